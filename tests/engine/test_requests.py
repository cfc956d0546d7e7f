from __future__ import annotations

from typing import Any

import pytest

from octavo.core.config import EngineConfig, ResolvedConfig
from octavo.core.errors import InvalidRequest, PromptTooLong
from octavo.core.request import KnownOutput, Request, Submission, uniform
from octavo.core.sampling_params import SamplingParams
from octavo.engine.requests import make_requests

CONFIG = ResolvedConfig(
    wish=EngineConfig(), model_path="", model_name="toy", backend="", device="", dtype="", kv_dtype="", threads=1,
    max_model_len=100, max_num_seqs=4, block_size=16, cache_groups=(("full", 10),), kv_cache_bytes=0, vocab_size=50,
    eos_token_ids=frozenset({2}), system_fingerprint="",
)  # fmt: skip


def make(prompt: list[Any], n: int = 1, **sampling: object) -> list[Request]:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    submission = Submission(request_id="r", prompt_token_ids=prompt, sampling=params, n=n)
    return make_requests(CONFIG, submission, arrival_s=0.0)


def test_open_ends_are_resolved() -> None:
    (request,) = make([1, 2, 3], stop_token_ids=(7,))
    assert request.max_tokens == 97
    assert request.stop_token_ids == {2, 7}
    (request,) = make([1], ignore_eos=True, max_tokens=0)
    assert (request.max_tokens, request.stop_token_ids) == (0, frozenset())


def test_a_mask_that_leaves_a_token_is_fine() -> None:
    assert make([1], allowed_token_ids=(2,))
    assert make([1], allowed_token_ids=(2, 5), min_tokens=3, bad_words_token_ids=((5, 5),))


def test_a_seed_is_kept_and_a_missing_one_is_drawn_anew() -> None:
    assert make([1], seed=5)[0].random_stream == make([1], seed=5)[0].random_stream
    assert make([1])[0].seed != make([1])[0].seed
    assert 0 <= make([1], seed=-1)[0].seed < 2**64
    assert make([1], seed=-2)[0].seed == make([1], seed=2**64 - 2)[0].seed == 2**64 - 2


def test_n_sequences_are_forks_of_the_first_with_streams_of_their_own() -> None:
    requests = make([1, 2], n=3, seed=1, prompt_logprobs=1)
    assert [r.request_id for r in requests] == ["r", "r#1", "r#2"]
    assert [r.fork_of for r in requests] == [None, "r", "r"]
    assert len({r.request_id for r in requests}) == len({r.random_stream for r in requests}) == 3
    assert [r.sampling.prompt_logprobs for r in requests] == [1, None, None]


def test_what_just_fits_the_context_is_served() -> None:
    assert make([1] * 99)[0].max_tokens == 1
    assert make([1] * 100, max_tokens=0)[0].max_tokens == 0
    assert make([1] * 60, max_tokens=40, min_tokens=40)


def test_a_priority_may_be_any_number_of_32_bits() -> None:
    def of(priority: int) -> int:
        submission = Submission(request_id="r", prompt_token_ids=[1], sampling=SamplingParams(), priority=priority)
        return make_requests(CONFIG, submission, arrival_s=0.0)[0].priority

    for priority in (-(2**31), 2**31 - 1):
        assert of(priority) == priority
    for priority in (-(2**31) - 1, 2**31):
        with pytest.raises(InvalidRequest, match=f"priority is {priority} but"):
            of(priority)


def test_every_id_of_the_vocabulary_may_have_been_drawn_elsewhere() -> None:
    known = KnownOutput(token_ids=(0, CONFIG.vocab_size - 1), num_chars=0)
    sampling = SamplingParams(seed=1)
    submission = Submission(request_id="r", prompt_token_ids=[1], sampling=sampling, known_output=(known,))
    assert make_requests(CONFIG, submission, arrival_s=0.0)[0].known_output == known


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "words"),
    [
        ([], {}, InvalidRequest, "no tokens"),
        ([50], {}, InvalidRequest, "token id 50"),
        ([-1], {}, InvalidRequest, "token id -1"),
        ([1.5], {}, InvalidRequest, "token ids"),
        (["a"], {}, InvalidRequest, "token ids"),
        ([1] * 101, {}, PromptTooLong, "maximum context length is 100"),
        ([1] * 100, {}, PromptTooLong, "maximum context length is 100"),
        ([1] * 60, {"max_tokens": 41}, PromptTooLong, "need 101"),
        ([1], {"logit_bias": ((50, 1.0),)}, InvalidRequest, "logit_bias has token id 50"),
        ([1], {"stop_token_ids": (99,)}, InvalidRequest, "stop_token_ids"),
        ([1] * 98, {"min_tokens": 3}, InvalidRequest, "min_tokens is 3"),
        ([1], {"allowed_token_ids": (2,), "min_tokens": 3}, InvalidRequest, "allowed_token_ids leaves no token"),
        ([1], {"allowed_token_ids": (5,), "bad_words_token_ids": ((5,),)}, InvalidRequest, "allowed_token_ids leaves"),
        (
            [1],
            {"allowed_token_ids": (2, 5, 6), "min_tokens": 1, "stop_token_ids": (6,), "bad_words_token_ids": ((5,),)},
            InvalidRequest,
            "allowed_token_ids leaves",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    prompt: list[Any], sampling: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make(prompt, **sampling)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", True),
        ("temperature", 10**400),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", 10**400),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("logprobs", 21),
        ("max_tokens", -1),
        ("seed", 2**64),
        ("dry_allowed_length", 0),
        ("stop", ("",)),
        ("stop", ("x",) * 17),
        ("allowed_token_ids", ()),
        ("bad_words_token_ids", ((),)),
        ("logit_bias", ((1, float("nan")),)),
        ("logit_bias", {1: "x"}),
        ("stop", 5),
        ("stop", (b"x",)),
        ("stop_token_ids", 5),
        ("stop_token_ids", (1.5,)),
        ("allowed_token_ids", "12"),
        ("bad_words_token_ids", (5,)),
        ("bad_words_token_ids", ("word",)),
    ],
)
def test_a_parameter_out_of_range_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field.removesuffix("_token_ids").split("_ids")[0]):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_what_people_write_for_a_tuple_means_the_same() -> None:
    assert SamplingParams(stop="END") == SamplingParams(stop=["END"]) == SamplingParams(stop=("END",))  # type: ignore[arg-type]
    assert SamplingParams(logit_bias={5: 1.0}) == SamplingParams(logit_bias=((5, 1.0),))  # type: ignore[arg-type]
    listed = SamplingParams(stop_token_ids=[1], allowed_token_ids=[2], bad_words_token_ids=[[3, 4]])  # type: ignore[arg-type]
    assert listed == SamplingParams(stop_token_ids=(1,), allowed_token_ids=(2,), bad_words_token_ids=((3, 4),))
    assert hash(listed)


def test_uniform_numbers_are_a_pure_function_and_look_uniform() -> None:
    assert uniform(1, 2) == uniform(1, 2)
    assert uniform(1, 2) != uniform(1, 2, 1)
    draws = [uniform(12345, position) for position in range(20_000)]
    assert all(0.0 <= u < 1.0 for u in draws)
    counts = [sum(low <= u < low + 0.1 for u in draws) for low in (i / 10 for i in range(10))]
    chi_square = sum((count - 2000) ** 2 / 2000 for count in counts)
    assert chi_square < 27.9, "99.9 % quantile with 9 degrees of freedom"


def test_all_choices_share_one_record_of_parameters_and_of_stop_tokens() -> None:
    first, *forks = make([1, 2], n=16, prompt_logprobs=1, stop_token_ids=(7, 8))
    assert len({id(request.sampling) for request in forks}) == 1
    assert len({id(request.stop_token_ids) for request in (first, *forks)}) == 1
    assert len({id(request.sampling) for request in make([1, 2], n=16)}) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", ((50, 1.0),)),
        ("allowed_token_ids", (1, 50)),
        ("stop_token_ids", (-1,)),
        ("bad_words_token_ids", ((1,), (2, 50))),
        ("dry_sequence_breaker_ids", (50,)),
    ],
)
def test_a_token_id_outside_the_vocabulary_is_refused_by_the_name_of_its_list(field: str, value: object) -> None:
    wanted = {"bad_words_token_ids": "bad_words", "dry_sequence_breaker_ids": "dry_sequence_breakers"}.get(field, field)
    with pytest.raises(InvalidRequest, match=wanted) as caught:
        make([1], **{field: value})
    assert caught.value.param == wanted


def test_dry_takes_as_many_breaker_tokens_as_the_vocabulary_has() -> None:
    assert make([1], dry_multiplier=0.8, dry_sequence_breaker_ids=tuple(range(50)) * 200)


def test_every_id_of_the_vocabulary_may_stand_in_a_prompt_and_no_other() -> None:
    last = CONFIG.vocab_size - 1
    assert make([0, last, 0])[0].prompt_token_ids == (0, last, 0)
    for prompt, bad in (([0, last + 1, 1], last + 1), ([5, -1, last], -1)):
        with pytest.raises(InvalidRequest, match=f"token id {bad} but"):
            make(prompt)
