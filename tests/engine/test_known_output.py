"""An answer that goes on in another process: from what was drawn and sent there, to the same end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from octavo.core.config import EngineConfig
from octavo.core.errors import InvalidRequest
from octavo.core.output import RequestOutput
from octavo.core.request import KnownOutput, Submission
from octavo.core.sampling_params import SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.load import load_engine
from octavo.engine.requests import make_requests
from weights.gguf_writer import random_llama

PROMPT = (5, 6, 7, 40, 41)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy with penalties": {"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    "masks": {"bad_words_token_ids": ((50, 51), (60,)), "dry_multiplier": 0.8, "min_tokens": 9},
    "stops that almost come": {"stop": ("qqqq", "\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd")},
    "a stop": {"stop": ("t", "th", "e", "\u00e4")},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Its tokens are bytes, so that most are parts of characters."""
    path = tmp_path_factory.mktemp("model") / "random.gguf"
    random_llama(path, seed=3)
    loaded = load_engine(EngineConfig(model=str(path), max_num_seqs=4, max_model_len=64))
    yield loaded
    loaded.close()


def run(engine: Engine, sampling: SamplingParams, known: tuple[KnownOutput, ...] = (), n: int = 1) -> list[Any]:
    """Per choice: its outputs, in order."""
    name = f"r{run.count}"  # type: ignore[attr-defined]
    run.count += 1  # type: ignore[attr-defined]
    asked = Submission(request_id=name, prompt_token_ids=PROMPT, sampling=sampling, n=n, known_output=known)
    engine.submit(make_requests(engine.config, asked, arrival_s=0.0))
    outputs: list[list[RequestOutput]] = [[] for _ in range(n)]
    while engine.has_unfinished:
        for output in engine.step():
            outputs[output.choice_index].append(output)
    return outputs


run.count = 0  # type: ignore[attr-defined]


def joined(outputs: list[RequestOutput]) -> tuple[str, list[int], list[Any]]:
    text = "".join(output.text for output in outputs)
    ids = [token for output in outputs for token in output.token_ids]
    return text, ids, [token for output in outputs for token in output.logprobs or ()]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_an_answer_goes_on_as_if_it_had_never_been_away(engine: Engine, name: str) -> None:
    sampling = SamplingParams(**{"seed": 4, "max_tokens": 24, "ignore_eos": True, "logprobs": 1, **SAMPLINGS[name]})
    (whole,) = run(engine, sampling)
    text, ids, logprobs = joined(whole)
    for cut in range(len(whole)):
        sent, told, _ = joined(whole[:cut])
        (rest,) = run(engine, sampling, (KnownOutput(token_ids=tuple(told), num_chars=len(sent)),))
        assert joined(rest) == (text[len(sent) :], ids[len(told) :], logprobs[len(told) :]), f"after {cut} outputs"
        assert rest[-1].finish_reason == whole[-1].finish_reason
        assert rest[-1].stop_reason == whole[-1].stop_reason
        assert rest[-1].usage.completion_tokens == whole[-1].usage.completion_tokens
        assert rest[-1].usage.prompt_tokens == len(PROMPT)


def test_tokens_that_were_drawn_but_not_sent_are_told_with_the_first_that_follow(engine: Engine) -> None:
    sampling = SamplingParams(seed=4, max_tokens=24, ignore_eos=True)
    (whole,) = run(engine, sampling)
    text, ids, _ = joined(whole)
    (rest,) = run(engine, sampling, (KnownOutput(token_ids=tuple(ids[:20]), num_chars=3),))
    assert joined(rest)[0] == text[3:]


def test_several_choices_go_on_from_where_each_of_them_was(engine: Engine) -> None:
    sampling = SamplingParams(seed=9, max_tokens=16, ignore_eos=True)
    whole = run(engine, sampling, n=3)
    known = []
    for outputs, cut in zip(whole, (0, 5, 11), strict=True):
        sent, told, _ = joined(outputs[:cut])
        known.append(KnownOutput(token_ids=tuple(told), num_chars=len(sent)))
    rest = run(engine, sampling, tuple(known), n=3)
    for before, after, one in zip(whole, rest, known, strict=True):
        text, ids, _ = joined(before)
        assert joined(after)[:2] == (text[one.num_chars :], ids[len(one.token_ids) :])


@pytest.mark.parametrize(
    ("known", "fields", "message"),
    [
        ([(1, 2)], {"n": 2}, "is of 1 choices but n is 2"),
        ([(1, 2)], {"seed": None}, "needs the seed"),
        ([(1,) * 24], {}, "24 of max_tokens = 24: there is nothing to add"),
        ([(1, 99_999)], {}, "outside the vocabulary"),
        ([(1, -1)], {}, "outside the vocabulary"),
    ],
)
def test_what_cannot_go_on_is_refused(engine: Engine, known: Any, fields: dict[str, Any], message: str) -> None:
    sampling = SamplingParams(seed=fields.get("seed", 1), max_tokens=24)
    outputs = tuple(KnownOutput(token_ids=ids, num_chars=0) for ids in known)
    with pytest.raises(InvalidRequest, match=message):
        run(engine, sampling, outputs, n=fields.get("n", 1))


def test_an_answer_that_its_stop_string_has_ended_is_refused_and_leaves_nothing(engine: Engine) -> None:
    sampling = SamplingParams(seed=4, max_tokens=24, ignore_eos=True, stop=("t",))
    token = engine.tokenizer.encode("t")[0]
    with pytest.raises(InvalidRequest, match="holds the stop string 't': the answer is whole"):
        run(engine, sampling, (KnownOutput(token_ids=(token,), num_chars=0),))
    assert not engine.has_unfinished
    assert not engine.processor._sequences
