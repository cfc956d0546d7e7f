"""The batched sampler against the written-out one, and the distributions it draws from."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import extreme_draws
import numpy as np
import pytest
import torch

from octavo.core.plan import SampledToken
from octavo.core.request import mix64, uniform
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.base import Draw
from octavo.kernels.reference import sampling as ref
from octavo.kernels.torch import sampling as fast
from octavo.kernels.torch.adjust import adjust, dry_penalties
from octavo.kernels.torch.truncation import smallest_set

VOCAB = 3001  # odd, and more than the candidates fetched on either try

SHAPES = {
    "peaked": lambda rng, n: 3.0 * rng.standard_normal(n),
    "flat": lambda rng, n: 0.01 * rng.standard_normal(n),
    "equal": lambda rng, n: np.zeros(n),
    "tied": lambda rng, n: np.round(2.0 * rng.standard_normal(n)),
    "huge": lambda rng, n: 1e30 * rng.standard_normal(n),
    "one-hot": lambda rng, n: np.where(np.arange(n) == 7, 80.0, 0.0),
    "few": lambda rng, n: np.where(np.arange(n) % 100 == 3, rng.standard_normal(n), -60.0),
}

FEATURES = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "cool": {"temperature": 0.3},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 40},
    "top_k 1": {"top_k": 1},
    "top_k wide": {"top_k": 700},
    "top_k wider": {"top_k": 2000},
    "top_k all": {"top_k": VOCAB},
    "top_p": {"top_p": 0.9},
    "top_p tiny": {"top_p": 1e-6},
    "top_p wide": {"top_p": 0.999},
    "min_p": {"min_p": 0.05},
    "min_p tiny": {"min_p": 1e-7},
    "min_p one": {"min_p": 1.0},
    "typical": {"typical_p": 0.6},
    "typical wide": {"typical_p": 0.97},
    "xtc": {"xtc_probability": 0.7, "xtc_threshold": 0.05},
    "xtc always": {"xtc_probability": 1.0, "xtc_threshold": 0.001, "top_p": 0.95},
    "xtc zero": {"xtc_probability": 1.0, "xtc_threshold": 0.0, "top_k": 20},
    "all shapes": {"temperature": 1.3, "top_k": 200, "typical_p": 0.9, "top_p": 0.95, "min_p": 0.01},
    "k and p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "xtc_probability": 0.5},
    "k at the edge": {"temperature": 2.0, "top_k": 63, "top_p": 0.5, "min_p": 0.3},
    "p and min_p": {"top_p": 0.99, "min_p": 0.2},
    "bias": {"logit_bias": ((3, 5.0), (9, -100.0), (3, 1.0))},
    "allowed": {"allowed_token_ids": (5, 2, 2999), "top_p": 0.9},
    "bad words": {"bad_words_token_ids": ((5,), (1, 2), (6, 7)), "temperature": 0.0},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3, "top_k": 64},
    "negative penalties": {"repetition_penalty": 0.7, "presence_penalty": -1.0, "frequency_penalty": -0.5},
    "dry": {"dry_multiplier": 0.8, "dry_sequence_breaker_ids": (0,), "temperature": 0.0},
    "everything": {
        "logit_bias": ((3, 5.0), (9, -100.0)),
        "repetition_penalty": 1.2,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "dry_multiplier": 1.0,
        "temperature": 0.9,
        "top_k": 500,
        "typical_p": 0.95,
        "top_p": 0.97,
        "min_p": 0.001,
        "xtc_probability": 0.5,
        "logprobs": 5,
    },
}


def make_draw(rng: np.random.Generator, params: SamplingParams) -> Draw:
    history = rng.integers(0, 8, int(rng.integers(0, 60))).tolist()
    return Draw(
        params=params,
        random_stream=int(rng.integers(0, 2**63)),
        position=len(history),
        history=history if params.needs_history else (),
        prompt_len=len(history) // 2,
        banned_token_ids=(4, 11) if rng.random() < 0.2 else (),
    )


def near_a_boundary(logits: np.ndarray, draw: Draw) -> bool:
    """Whether a relative change of 1e-5 in a sum of weights may change the draw: float32 sums differ by about that."""
    if draw.params.greedy:
        return False
    nudged = [
        replace(draw, params=replace(draw.params, **{name: value}))
        for name in ("top_p", "min_p", "typical_p", "xtc_threshold")
        for value in (getattr(draw.params, name) * (1 - 1e-5), getattr(draw.params, name) * (1 + 1e-5))
        if 0.0 < value < 1.0 and getattr(draw.params, name) not in (0.0, 1.0)
    ]
    z = ref.shape(ref.adjust(logits, draw), draw)
    u = uniform(draw.random_stream, draw.position, 0)
    around = {ref.inverse_cdf(z, min(max(u + step, 0.0), 1 - 2**-53)) for step in (-1e-5, 0.0, 1e-5)}
    sets = {(ref.shape(ref.adjust(logits, d), d) > -np.inf).tobytes() for d in [draw, *nudged]}
    return len(around) > 1 or len(sets) > 1


@pytest.mark.parametrize("feature", FEATURES)
def test_batched_draws_equal_the_reference(feature):
    rng = np.random.default_rng(sorted(FEATURES).index(feature))
    params = SamplingParams(**FEATURES[feature])
    logits = np.stack([make(rng, VOCAB) for make in SHAPES.values() for _ in range(4)]).astype(np.float32)
    draws = [make_draw(rng, params) for _ in logits]
    found = fast.sample(torch.from_numpy(logits.copy()), draws)
    compared = 0
    for row, draw, token in zip(logits, draws, found, strict=True):
        want = ref.sample(row, draw)
        if isinstance(want, str) or isinstance(token, str):
            assert token == want
        elif not near_a_boundary(row, draw):
            compared += 1
            assert token.token_id == want.token_id
    assert compared >= len(logits) // 2, "most rows must be comparable, or this test says nothing"


def test_a_batch_of_all_features_draws_what_each_row_draws_alone():
    rng = np.random.default_rng(5)
    all_params = [SamplingParams(**feature) for feature in FEATURES.values()]
    logits = torch.from_numpy((2.0 * rng.standard_normal((len(all_params), VOCAB))).astype(np.float32))
    before = logits.clone()
    draws = [make_draw(rng, params) for params in all_params]
    together = fast.sample(logits, draws)
    assert torch.equal(logits, before), "raw logits must be left as they are"
    assert together == [fast.sample(logits[i : i + 1], [draw])[0] for i, draw in enumerate(draws)]


def test_adjusted_logits_equal_the_reference_bit_for_bit():
    rng = np.random.default_rng(3)
    params = [SamplingParams(**feature) for feature in FEATURES.values()]
    logits = rng.standard_normal((len(params), VOCAB)).astype(np.float32)
    draws = [make_draw(rng, p) for p in params]
    x = torch.from_numpy(logits.copy())
    adjust(x, draws)
    for row, draw, got in zip(logits, draws, x.numpy(), strict=True):
        assert np.array_equal(ref.adjust(row, draw), got)


@pytest.mark.parametrize("seed", range(40))
def test_dry_matches_the_reference_on_repetitive_histories(seed):
    rng = np.random.default_rng(seed)
    history = rng.integers(0, 1 + seed % 4, int(rng.integers(0, 400)))
    params = SamplingParams(
        dry_multiplier=0.7,
        dry_base=1.0 + seed % 3 * 0.4,
        dry_allowed_length=1 + seed % 5,
        dry_penalty_last_n=-1 if seed % 2 else 50,
        dry_sequence_breaker_ids=(0,) if seed % 3 else (),
    )
    want = ref.dry_penalty(np.zeros(5, np.float32), history.tolist(), params)
    got = np.zeros(5, np.float32)
    for token, penalty in dry_penalties(history, params).items():
        got[token] -= np.float32(penalty)
    assert np.array_equal(got, want)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [1e-9, 0.3, 0.9, 0.9999, 1.0, 2.0])
def test_quickselect_finds_the_set_that_a_sort_finds(shape, share):
    rng = np.random.default_rng(1)
    z = SHAPES[shape](rng, 20_011)
    key = z - z.max()
    # whole numbers: sums are exact in any order
    weight = rng.integers(0, 5, len(z)).astype(np.float64)
    target = math.ceil(share * weight.sum())
    order = np.argsort(-key, kind="stable")
    order = order[weight[order] > 0]
    end = int(np.searchsorted(np.cumsum(weight[order]), target)) + 1
    want = np.zeros(len(z), dtype=bool)
    want[order[:end]] = True
    assert np.array_equal(smallest_set(key, weight, target), want)


def test_non_finite_rows_fail_alone():
    logits = torch.zeros(5, 300)
    logits[0, 7], logits[1, 299], logits[2, 0] = math.nan, math.inf, -math.inf
    logits[4, 9] = 5.0
    params = [SamplingParams(temperature=t, logprobs=n) for t, n in ((0, 2), (1, 2), (1, None), (1, None), (0, 2))]
    tokens = fast.sample(logits, [Draw(params=p, random_stream=1, position=i) for i, p in enumerate(params)])
    assert [token if isinstance(token, str) else "" for token in tokens] == [*["not_finite"] * 3, "", ""]
    assert isinstance(tokens[4], SampledToken)
    assert tokens[4].token_id == 9
    logprobs = fast.row_logprobs(logits, [(0, 2)] * 5)
    assert [token if isinstance(token, str) else "" for token in logprobs] == [*["not_finite"] * 3, "", ""]


def test_a_row_with_everything_masked_fails_alone():
    logits = torch.zeros(3, 50)
    params = SamplingParams(allowed_token_ids=(3,))
    draws = [Draw(params=params, random_stream=1, position=1, banned_token_ids=banned) for banned in ((), (3,), (4,))]
    tokens = fast.sample(logits, draws)
    assert [token if isinstance(token, str) else token.token_id for token in tokens] == [3, "no_token_left", 3]


@pytest.mark.parametrize("shape", ["peaked", "equal", "tied"])
@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_reported_logprobs_equal_the_reference(shape, count):
    rng = np.random.default_rng(2)
    logits = SHAPES[shape](rng, 1001).astype(np.float32)
    got = fast.row_logprobs(torch.from_numpy(logits[None]), [(17, count)])[0]
    want = ref.report(logits, 17, count)
    assert isinstance(got, SampledToken)
    assert want.logprob is not None
    assert got.logprob == pytest.approx(want.logprob, abs=1e-5)
    assert [token for token, _ in got.top] == [token for token, _ in want.top]
    assert [p for _, p in got.top] == pytest.approx([p for _, p in want.top], abs=1e-5)


@pytest.mark.parametrize("p", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("vocab_size", [4, 2048])
def test_top_p_stops_exactly_where_the_mass_is_reached(p, vocab_size):
    """Equal weights of a power of two: every sum is exact, so the boundary token is out or in without doubt."""
    rows = torch.zeros(300, vocab_size)
    draws = [Draw(params=SamplingParams(top_p=p), random_stream=1, position=position) for position in range(300)]
    drawn = [token.token_id for token in fast.sample(rows, draws)]
    assert drawn == [ref.sample(rows[0].numpy(), draw).token_id for draw in draws]
    assert max(drawn) < p * vocab_size


def test_a_vocabulary_smaller_than_every_bound_works():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    for features in FEATURES.values():
        kept = {k: v for k, v in features.items() if not k.endswith("_ids") and k != "logit_bias"}
        draw = Draw(params=SamplingParams(**kept), random_stream=3, position=4)
        want = ref.sample(logits[0].numpy(), draw)
        got = fast.sample(logits, [draw])[0]
        assert isinstance(got, SampledToken)
        assert isinstance(want, SampledToken)
        assert got.token_id == want.token_id


@pytest.mark.parametrize("seed", range(10))
def test_at_the_ends_of_every_range_a_token_comes(seed):
    rules = extreme_draws.rules(seed, 64)
    logits = np.tile(extreme_draws.rows(), (8, 1))
    draws = [Draw.at(rule, i) for i, rule in enumerate(rules)]
    x = torch.from_numpy(logits.copy())
    adjust(x, draws)
    for row, draw, got, adjusted in zip(logits, draws, fast.sample(torch.from_numpy(logits), draws), x, strict=True):
        assert isinstance(got, SampledToken), draw
        want = ref.adjust(row, draw)
        assert np.array_equal(want, adjusted.numpy()), draw
        assert want[got.token_id] > -np.inf, "a masked token was drawn"


@pytest.mark.parametrize(("fields", "left"), extreme_draws.BOUNDARIES, ids=str)
def test_truncation_stops_at_the_token_that_reaches_the_mass(fields, left):
    rule = extreme_draws.boundary_rule(fields, left, 1)
    [token] = fast.sample(torch.zeros(1, extreme_draws.BOUNDARY_VOCAB), [Draw.at(rule, 1)])
    assert isinstance(token, SampledToken)
    assert token.token_id == left - 1


@pytest.mark.parametrize("more", [{}, {"typical_p": 1 - 2**-53}, {"min_p": 1e-9}], ids=str)
def test_top_p_takes_the_unlikely_token_that_it_needs(more):
    logits = torch.from_numpy(extreme_draws.THIN_ROW[None].copy())
    [token] = fast.sample(logits, [Draw.at(extreme_draws.thin_rule(1, **more), 1)])
    assert isinstance(token, SampledToken)
    assert token.token_id == 1


@pytest.mark.parametrize("more", [{}, {"top_k": 4}, {"top_p": 1 - 2**-53}, {"typical_p": 1 - 2**-53}], ids=str)
def test_xtc_counts_a_token_at_the_threshold_as_above_it(more):
    for params, drawn in (
        (replace(extreme_draws.XTC_AT_THE_THRESHOLD, **more), {3}),
        (replace(extreme_draws.XTC_ABOVE_THE_THRESHOLD, **more), {0, 1, 2, 3}),
    ):
        draws = [Draw(params=params, random_stream=stream, position=0) for stream in range(40)]
        assert {token.token_id for token in fast.sample(torch.zeros(40, 4), draws)} == drawn


@pytest.mark.slow
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 12, "temperature": 1.5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"typical_p": 0.7},
        {"xtc_probability": 0.5, "xtc_threshold": 0.1},
    ],
    ids=str,
)
def test_draws_follow_the_distribution_by_chi_square(features):
    """4,000 draws of different positions against the probabilities that the reference keeps."""
    params, num_draws, stream = SamplingParams(**features), 4_000, mix64(11)
    logits = (1.5 * np.random.default_rng(8).standard_normal(40)).astype(np.float32)
    expected = np.zeros(40)
    coins = {False: 1.0 - params.xtc_probability, True: params.xtc_probability}
    for strikes, probability in coins.items():
        z = ref.keep_top_k(ref.scale_by_temperature(logits, params.temperature), params.top_k)
        z = ref.keep_min_p(ref.keep_top_p(ref.keep_typical(z, params.typical_p), params.top_p), params.min_p)
        w = ref.weights(ref.exclude_top_choices(z, params.xtc_threshold) if strikes else z)
        expected += probability * num_draws * w / w.sum()
    draws = [Draw(params=params, random_stream=stream, position=position) for position in range(num_draws)]
    rows = torch.from_numpy(logits).expand(num_draws, -1).contiguous()
    counts = Counter(token.token_id for token in fast.sample(rows, draws))
    observed = np.array([counts[token] for token in range(40)])
    assert observed.sum() == num_draws
    assert observed[expected == 0].sum() == 0
    common = expected >= 5
    bins_o = np.append(observed[common], observed[~common].sum())
    bins_e = np.append(expected[common], expected[~common].sum())
    bins_o, bins_e = bins_o[bins_e > 0], bins_e[bins_e > 0]
    chi_square, freedom = float(((bins_o - bins_e) ** 2 / bins_e).sum()), len(bins_e) - 1
    # Wilson, Hilferty 1931: (chi2 / k) ** (1/3) is nearly normal; 3.7 sigma is one chance in ten thousand
    deviation = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert deviation < 3.7, f"chi-square {chi_square:.1f} with {freedom} degrees of freedom"


def test_a_stream_and_a_position_decide_the_draw_and_nothing_else():
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.standard_normal((3, 500)).astype(np.float32))
    draws = [Draw(params=SamplingParams(), random_stream=stream, position=9) for stream in (1, 2, 3)]
    alone = [fast.sample(logits[i : i + 1], [draws[i]])[0] for i in range(3)]
    shuffled = fast.sample(logits[[2, 0, 1]], [draws[i] for i in (2, 0, 1)])
    assert shuffled == [alone[2], alone[0], alone[1]]
