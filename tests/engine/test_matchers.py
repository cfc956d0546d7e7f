"""Grammars by a toy matcher: answers obey it under any schedule, and one that misbehaves ends its request alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from toy_grammar import MAKERS, Broken, Numbers, NumbersMatcher, Teacher

from octavo.core.config import EngineConfig
from octavo.core.errors import InvalidRequest
from octavo.core.output import RequestOutput
from octavo.core.request import KnownOutput, Submission
from octavo.core.sampling_params import SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.load import load_engine
from octavo.engine.requests import make_requests
from octavo.text import grammar
from weights.gguf_writer import random_llama

PROMPT = tuple(range(5, 27))
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {},
    "with other masks": {"bad_words_token_ids": ((20, 21),), "repetition_penalty": 1.3, "min_tokens": 4, "top_k": 40},
    "biased to the end": {"logit_bias": {96: 4.0}},  # "]"
}
Answers = list[list[RequestOutput]]


@pytest.fixture(autouse=True)
def makers(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, maker in MAKERS.items():
        monkeypatch.setitem(grammar.MAKERS, kind, maker)
    NumbersMatcher.made = []


def load(tmp_path_factory: pytest.TempPathFactory, **wish: Any) -> Engine:
    path = tmp_path_factory.mktemp("model") / "random.gguf"
    random_llama(path, seed=3)
    fields = {"max_num_seqs": 12, "max_model_len": 64, "block_size": 4, **wish}
    return load_engine(EngineConfig(model=str(path), **fields))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    loaded = load(tmp_path_factory)
    yield loaded
    loaded.close()


def submission(name: str, sampling: SamplingParams, grammar: object = Numbers(), **fields: Any) -> Submission:
    return Submission(request_id=name, prompt_token_ids=PROMPT, sampling=sampling, grammar=grammar, **fields)


def run(engine: Engine, *asked: Submission) -> dict[str, Answers]:
    """Submitted together -> the outputs of each choice of each. Nothing is left of any."""
    answers: dict[str, Answers] = {}
    for one in asked:
        engine.submit(make_requests(engine.config, one, arrival_s=0.0))
        answers[one.request_id] = [[] for _ in range(one.n)]
    while engine.has_unfinished:
        for output in engine.step():
            answers[output.request_id.partition("#")[0]][output.choice_index].append(output)
    engine.scheduler.manager.check_integrity()
    assert engine.runner.matchers._open == {}
    return answers


def joined(outputs: list[RequestOutput]) -> Any:
    last = outputs[-1]
    assert last.usage is not None
    return (
        "".join(output.text for output in outputs),
        [token for output in outputs for token in output.token_ids],
        [token for output in outputs for token in output.logprobs or ()],
        (last.finish_reason, last.stop_reason, last.usage.completion_tokens),
    )


def params(name: str, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 4, "max_tokens": 20, "logprobs": 1, **SAMPLINGS[name], **fields})


def check_obeys(result: Any) -> None:
    text, _, _, (reason, _, _) = result
    if reason == "stop":
        assert Numbers.WHOLE.fullmatch(text.encode())
    else:
        assert reason == "length"
        assert Numbers.WHOLE.fullmatch((text + {"[": "1]", ",": "1]", "]": ""}.get(text[-1], "]")).encode())


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_choice_obeys_and_its_matcher_saw_just_its_tokens(
    tmp_path_factory: pytest.TempPathFactory, name: str, backend: Any
) -> None:
    engine = load(tmp_path_factory, backend=backend)
    try:
        results = [joined(outputs) for outputs in run(engine, submission("a", params(name), n=3))["a"]]
    finally:
        engine.close()
    for result, matcher in zip(results, NumbersMatcher.made, strict=True):
        check_obeys(result)
        _, ids, logprobs, _ = result
        assert matcher.accepted == ids[:-1], "the token that ends the answer is none of the grammar's"
        assert matcher.rolled_back == 0
        assert len(logprobs) == len(ids)
    if name != "greedy":
        assert len({result[0] for result in results}) > 1, "each choice has a matcher of its own"


def test_answers_end_when_the_grammar_does(engine: Engine) -> None:
    ended = [
        joined(outputs)
        for seed in range(8)
        for outputs in run(engine, submission(f"e{seed}", params("biased to the end", seed=seed, max_tokens=40)))[
            f"e{seed}"
        ]
    ]
    assert sum(result[3][0] == "stop" for result in ended) >= 4
    for result in ended:
        check_obeys(result)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_masked_answer_is_the_same_in_any_company_and_after_preemption(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    alone = [joined(outputs) for outputs in run(engine, submission("alone", params(name), n=3))["alone"]]
    small = load(tmp_path_factory, kv_cache_memory=26 << 10, chunking="fixed", chunk_size=7)
    try:
        company = [
            submission("b", params("seeded", seed=9), n=2),
            submission("c", SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), grammar=None, n=2),
            submission("again", params(name), n=3),
        ]
        answers = run(small, *company)
        assert [joined(outputs) for outputs in answers["again"]] == alone
        assert any(record.preempted for record in small.tracer.steps())
        for outputs in answers["b"]:
            check_obeys(joined(outputs))
    finally:
        small.close()


@pytest.mark.parametrize("right", [[100], [0], [2, 0, 1, 100], [1]])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_drafts_change_nothing_and_are_rolled_back(engine: Engine, name: str, right: list[int]) -> None:
    plain = [joined(outputs) for outputs in run(engine, submission("plain", params(name), n=3))["plain"]]
    before = len(NumbersMatcher.made)
    engine.scheduler.drafter = Teacher({i: result[1] for i, result in enumerate(plain)}, right)
    try:
        drafted = [joined(outputs) for outputs in run(engine, submission("drafted", params(name), n=3))["drafted"]]
    finally:
        engine.scheduler.drafter = None
    assert drafted == plain
    matched = NumbersMatcher.made[before:]
    if right == [100]:
        assert sum(matcher.rolled_back for matcher in matched) > 5
    for matcher, (_, ids, _, _) in zip(matched, drafted, strict=True):
        assert matcher.accepted == ids[: len(matcher.accepted)], "between two steps it knows what was drawn, no more"


@pytest.mark.parametrize("name", SAMPLINGS)
def test_an_answer_goes_on_after_known_output(engine: Engine, name: str) -> None:
    (whole,) = run(engine, submission("whole", params(name)))["whole"]
    text, ids, logprobs, end = joined(whole)
    for cut in range(1, len(ids)):
        sent = "".join(chr(engine.tokenizer.bytes_by_id[token][0]) for token in ids[:cut])
        known = (KnownOutput(token_ids=tuple(ids[:cut]), num_chars=len(sent)),)
        (rest,) = run(engine, submission(f"w{cut}", params(name), known_output=known))[f"w{cut}"]
        assert joined(rest) == (text[len(sent) :], ids[cut:], logprobs[cut:], end)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "the grammar's matcher failed after 3 tokens: KeyError: 'a rule is missing'"),
        ("refuse", "the grammar's matcher failed after 4 tokens: ValueError: not that one"),
        ("short", "its mask has 4 bytes but the vocabulary takes 36"),
        ("nothing", "grammar left no token to draw after 3 tokens"),
    ],
)
def test_a_matcher_that_misbehaves_ends_its_request_alone(engine: Engine, how: str, message: str) -> None:
    others = [joined(outputs) for outputs in run(engine, submission("o", params("seeded"), n=2))["o"]]
    free = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    answers = run(engine, submission("bad", free, Broken(how)), submission("good", params("seeded"), n=2))
    last = answers["bad"][0][-1]
    assert last.finish_reason == "error"
    assert message in str(last.stop_reason)
    assert last.failure == ("no_token_left" if how == "nothing" else "matcher_raised")
    assert [joined(outputs) for outputs in answers["good"]] == others


def test_a_grammar_that_has_ended_with_nothing_to_end_the_answer_leaves_no_token(engine: Engine) -> None:
    asked = submission("x", params("biased to the end", ignore_eos=True, max_tokens=40, logit_bias={96: 30.0}))
    ((*_, last),) = run(engine, asked)["x"]
    assert (last.finish_reason, last.failure) == ("error", "no_token_left")
    assert str(last.stop_reason).startswith("grammar left no token to draw after")


def test_aborted_and_unqueued_requests_leave_no_matcher(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.submit(make_requests(engine.config, submission("gone", params("seeded"), n=2), arrival_s=0.0))
    engine.step()
    assert len(engine.runner.matchers._open) == 2
    engine.abort("gone")
    engine.abort("gone#1")
    assert engine.runner.matchers._open == {}
    requests = make_requests(engine.config, submission("unqueued", params("seeded"), n=2), arrival_s=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "add", lambda request: {}[request.request_id])
        with pytest.raises(KeyError):
            engine.submit(requests)
    assert engine.runner.matchers._open == {}
    engine.submit(requests)
    assert len(engine.runner.matchers._open) == 2
    engine.end_all()
    assert engine.runner.matchers._open == {}
    engine.submit(requests[:1])
    with pytest.raises(InvalidRequest, match="in use"):
        engine.submit(requests[:1])
    engine.end_all()


def test_a_grammar_of_which_nobody_makes_matchers_is_refused_by_name(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"grammar is a dict but there are matchers of .*Numbers") as caught:
        make_requests(engine.config, submission("x", params("seeded"), {"type": "json"}), arrival_s=0.0)
    assert caught.value.param == "grammar"
