"""The written-out stages against hand-made rows, and their edge rules."""

from __future__ import annotations

import extreme_draws
import numpy as np
import pytest

from octavo.core.plan import SampledToken
from octavo.core.request import uniform
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.base import Draw
from octavo.kernels.reference import sampling as ref

INF = np.float32(np.inf)


def row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def kept(z: np.ndarray) -> list[int]:
    return np.flatnonzero(z > -INF).tolist()


def log(*weights: float) -> np.ndarray:
    return np.log(np.array(weights)).astype(np.float32)


def test_bias_of_one_token_given_twice_adds_up():
    assert ref.add_logit_bias(row(0, 1, 2), [(1, 0.5), (1, 0.25)]).tolist() == [0, 1.75, 2]


def test_a_bad_word_is_stopped_at_its_last_token_even_if_the_prompt_began_it():
    assert ref.forbidden_tokens([5, 6, 7], [(6, 7, 8), (7, 9), (1,), (6, 2)], [3]) == {8, 9, 1, 3}
    assert ref.forbidden_tokens([], [(6, 7)], []) == frozenset()


def test_a_mask_outlives_a_bias():
    draw = Draw(
        params=SamplingParams(logit_bias=((1, 100.0),), allowed_token_ids=(0, 1), temperature=0.0),
        random_stream=0,
        position=0,
        banned_token_ids=(1,),
    )
    assert kept(ref.adjust(row(0, 0, 0), draw)) == [0]


def test_repetition_divides_positive_and_multiplies_negative_logits_once_per_token():
    assert ref.repetition_penalty(row(2, -2, 2), [0, 1, 0], 2.0).tolist() == [1, -4, 2]
    assert ref.repetition_penalty(row(0.5, -0.5, 0), [0, 1, 2], 2.0).tolist() == [0.25, -1, 0]


def test_output_penalties_count_occurrences():
    assert ref.output_penalties(row(0, 0, 0), [0, 0, 2], 0.5, 0.25).tolist() == [-1.25, 0, -0.75]


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([1, 2, 3, 1, 2], {3: 1.0}),  # "1 2" repeats, 3 would make it three
        ([1, 2, 3, 4, 1, 2, 3], {4: 2.0}),
        ([5, 5, 5, 5], {5: 2.0}),
        ([1, 2, 3, 9, 2], {}),  # one token is under the allowed length
        ([1, 7, 3, 1, 7], {}),  # 7 breaks sequences
        ([7, 1, 3, 7, 1], {}),  # and is not reached across
        ([2, 7, 1, 3, 2, 7, 1], {}),
        ([], {}),
        ([1], {}),
    ],
)
def test_dry_penalises_what_would_lengthen_the_longest_repeat(history, expected):
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=2, dry_sequence_breaker_ids=(7,))
    x = ref.dry_penalty(np.zeros(10, np.float32), history, params)
    assert {int(i): float(-x[i]) for i in np.flatnonzero(x)} == expected


def test_dry_counts_a_repeat_of_one_token_where_that_is_allowed_no_longer():
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=1)
    assert (-ref.dry_penalty(np.zeros(7, np.float32), [5, 3, 6, 5], params)).tolist() == [0, 0, 0, 1, 0, 0, 0]


def test_dry_counts_no_more_than_256_tokens_and_takes_no_more_than_a_million():
    for base, most in ((1.01, 1.01**256), (4.0, 1e6)):
        params = SamplingParams(dry_multiplier=1.0, dry_base=base, dry_allowed_length=2)
        assert ref.dry_penalty(np.zeros(2, np.float32), [1] * 600, params).tolist() == [0, -np.float32(most)]


def test_the_temperature_divides_what_the_likeliest_is_ahead_by():
    assert ref.scale_by_temperature(row(1, 3, 2), 0.5).tolist() == [-4, 0, -2]
    assert ref.scale_by_temperature(row(1, 3, 2), 4.0).tolist() == [-0.5, 0, -0.25]


def test_every_stage_takes_part_in_a_draw():
    def draw(**fields):
        return Draw(params=SamplingParams(**fields), random_stream=0, position=3, history=[0, 1, 1], prompt_len=1)

    flat, peaked = row(0, 0, 0), log(0.6, 0.3, 0.1)
    assert ref.adjust(flat, draw(presence_penalty=1.0, frequency_penalty=0.5)).tolist() == [0, -2, 0]
    assert ref.adjust(row(2, 2, 2), draw(repetition_penalty=2.0)).tolist() == [1, 1, 2]
    assert ref.adjust(flat, draw(dry_multiplier=1.0, dry_allowed_length=1)).tolist() == [0, -1, 0]
    for fields, left in (
        ({"top_k": 1}, [0]),
        ({"top_p": 0.7}, [0, 1]),
        ({"typical_p": 0.2}, [1]),
        ({"min_p": 0.4}, [0, 1]),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.2}, [1, 2]),
    ):
        assert kept(ref.shape(peaked, draw(**fields))) == left, fields
    assert ref.shape(peaked, draw(temperature=0.5))[1] == pytest.approx(2 * np.log(0.5))


def test_dry_looks_back_no_further_than_it_is_told():
    history = [1, 2, 3, 8, 8, 1, 2]
    for last_n, hit in [(-1, [3]), (7, [3]), (6, []), (0, [])]:
        params = SamplingParams(dry_multiplier=1.0, dry_penalty_last_n=last_n)
        assert np.flatnonzero(ref.dry_penalty(np.zeros(9, np.float32), history, params)).tolist() == hit


def test_top_k_takes_the_lowest_ids_of_equals():
    assert kept(ref.keep_top_k(row(1, 3, 2, 2, 2), 3)) == [1, 2, 3]
    assert kept(ref.keep_top_k(row(1, 3, 2), 1)) == [1]
    assert kept(ref.keep_top_k(row(1, 3, 2), 0)) == [0, 1, 2]
    assert kept(ref.keep_top_k(row(1, 3, 2), 99)) == [0, 1, 2]


def test_top_p_takes_the_smallest_set_that_reaches_p_and_at_least_one():
    z = row(0, 0, 0, 0)  # four quarters
    assert kept(ref.keep_top_p(z, 0.5)) == [0, 1]
    assert kept(ref.keep_top_p(z, 0.51)) == [0, 1, 2]
    assert kept(ref.keep_top_p(z, 1e-9)) == [0]
    assert kept(ref.keep_top_p(z, 1.0)) == [0, 1, 2, 3]


def test_a_mass_of_one_keeps_even_what_no_sum_shows():
    z = row(0, -100)
    assert kept(ref.keep_top_p(z, 1.0)) == kept(ref.keep_typical(z, 1.0)) == [0, 1]


def test_min_p_is_relative_to_the_likeliest():
    assert kept(ref.keep_min_p(log(0.6, 0.3, 0.05, 0.05), 0.4)) == [0, 1]
    assert kept(ref.keep_min_p(row(1, 1, 0), 1.0)) == [0, 1]


def test_typical_prefers_tokens_near_the_entropy_over_the_likeliest():
    # entropy of (0.5, 5 x 0.1) is 1.498 nats; surprise of 0.5 is 0.69 and of 0.1 is 2.30: both off by 0.80
    z = log(0.4, 0.2, 0.2, 0.1, 0.1)  # entropy 1.47: 0.2 is nearest (1.61), then 0.4 (0.92), then 0.1 (2.30)
    assert kept(ref.keep_typical(z, 0.3)) == [1, 2]
    assert kept(ref.keep_typical(z, 0.7)) == [0, 1, 2]


def test_xtc_leaves_the_least_likely_of_those_above_the_threshold():
    z = log(0.4, 0.3, 0.2, 0.1)
    assert kept(ref.exclude_top_choices(z, 0.15)) == [2, 3]
    assert kept(ref.exclude_top_choices(z, 0.35)) == [0, 1, 2, 3]
    assert kept(ref.exclude_top_choices(row(0, 0, -INF), 0.0)) == [1]


def test_the_draw_is_the_first_id_whose_cumulative_weight_exceeds_u():
    z = log(0.25, 0.25, 0.5)
    assert [ref.inverse_cdf(z, u) for u in (0.0, 0.2499, 0.2501, 0.51, 1 - 2**-53)] == [0, 0, 1, 2, 2]
    assert ref.inverse_cdf(row(-INF, 0, -INF, 0, -INF), 1 - 2**-53) == 3
    assert ref.inverse_cdf(row(-INF, 0, -INF), 0.0) == 1


def test_a_row_that_is_not_finite_or_wholly_masked_draws_nothing():
    draw = Draw(params=SamplingParams(), random_stream=1, position=2)
    for bad in (np.nan, np.inf, -np.inf):
        assert ref.sample(row(0, bad, 0), draw) == "not_finite"
    nothing = Draw(params=SamplingParams(allowed_token_ids=(1,)), random_stream=1, position=2, banned_token_ids=(1,))
    assert ref.sample(row(0, 1, 2), nothing) == "no_token_left"


def test_temperature_zero_takes_the_first_maximum_after_the_penalties():
    draw = Draw(
        params=SamplingParams(temperature=0.0, repetition_penalty=2.0),
        random_stream=1,
        position=2,
        history=[2],
        prompt_len=1,
    )
    token = ref.sample(row(1.5, 1.5, 2), draw)
    assert isinstance(token, SampledToken)
    assert token.token_id == 0


def test_a_temperature_near_zero_neither_overflows_nor_differs_from_greedy():
    draw = Draw(params=SamplingParams(temperature=1e-300), random_stream=1, position=2)
    token = ref.sample(row(1e30, -1e30, 0), draw)
    assert isinstance(token, SampledToken)
    assert token.token_id == 0


def test_reported_logprobs_are_of_the_raw_row_with_ties_to_the_lowest_id():
    draw = Draw(
        params=SamplingParams(temperature=0.0, logit_bias=((3, 50.0),), logprobs=2), random_stream=1, position=2
    )
    token = ref.sample(row(0, 0, 0, -1), draw)
    assert isinstance(token, SampledToken)
    total = np.log(3 + np.exp(-1))
    assert token.token_id == 3
    assert token.logprob == pytest.approx(-1 - total)
    assert token.top == ((0, pytest.approx(-total)), (1, pytest.approx(-total)))


def test_logprobs_of_large_logits_stay_finite():
    assert ref.log_softmax(row(1000, 1000, -1000)).tolist() == [-np.log(2), -np.log(2), -2000 - np.log(2)]


@pytest.mark.parametrize("seed", range(10))
def test_at_the_ends_of_every_range_a_token_comes_and_what_is_not_masked_stays_finite(seed):
    for i, rule in enumerate(extreme_draws.rules(seed, 64)):
        logits, draw = extreme_draws.rows()[i % 8], Draw.at(rule, i)
        adjusted = ref.adjust(logits, draw)
        allowed = set(rule.params.allowed_token_ids or range(extreme_draws.VOCAB)) - set(rule.banned_token_ids)
        assert np.flatnonzero(np.isfinite(adjusted)).tolist() == sorted(allowed)
        assert (adjusted[~np.isfinite(adjusted)] == -INF).all()
        token = ref.sample(logits, draw)
        assert isinstance(token, SampledToken), rule
        assert token.token_id in allowed


def test_a_penalty_that_overflows_leaves_the_largest_number_and_a_masked_token_masked():
    largest = np.finfo(np.float32).max
    got = ref.repetition_penalty(row(2, -2, 0, -INF, 3), [0, 1, 2, 3], 1e-38)
    assert got.tolist() == [pytest.approx(2e20), pytest.approx(-2e-20), 0, -np.inf, 3]
    assert ref.repetition_penalty(row(1e30, -1e38, 1), [0, 1], 1e-30)[0] == largest
    assert ref.repetition_penalty(row(1e30, -1e38, 1), [0, 1], 100.0)[1] == -largest


@pytest.mark.parametrize(("fields", "left"), extreme_draws.BOUNDARIES, ids=str)
def test_truncation_stops_at_the_token_that_reaches_the_mass(fields, left):
    rule = extreme_draws.boundary_rule(fields, left, 1)
    token = ref.sample(np.zeros(extreme_draws.BOUNDARY_VOCAB, np.float32), Draw.at(rule, 1))
    assert isinstance(token, SampledToken)
    assert token.token_id == left - 1


@pytest.mark.parametrize("more", [{}, {"typical_p": 1 - 2**-53}, {"min_p": 1e-9}], ids=str)
def test_top_p_takes_the_unlikely_token_that_it_needs(more):
    token = ref.sample(extreme_draws.THIN_ROW, Draw.at(extreme_draws.thin_rule(1, **more), 1))
    assert isinstance(token, SampledToken)
    assert token.token_id == 1


def test_xtc_counts_a_token_at_the_threshold_as_above_it():
    at, above = extreme_draws.XTC_AT_THE_THRESHOLD, extreme_draws.XTC_ABOVE_THE_THRESHOLD
    for params, drawn in ((at, {3}), (above, {0, 1, 2, 3})):
        draws = [Draw(params=params, random_stream=stream, position=0) for stream in range(40)]
        assert {ref.sample(row(0, 0, 0, 0), draw).token_id for draw in draws} == drawn


def test_the_coin_of_xtc_is_not_the_number_of_the_draw():
    assert uniform(1, 2, 0) != uniform(1, 2, 1)
