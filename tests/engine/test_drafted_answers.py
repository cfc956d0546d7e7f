"""Drafted tokens on the native backend: the same answers to the bit, whoever guesses, and everything counted alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from toy_grammar import Teacher

from octavo.core.config import EngineConfig
from octavo.core.output import RequestOutput
from octavo.core.request import Submission
from octavo.core.sampling_params import SamplingParams
from octavo.engine import engine as engine_module
from octavo.engine import model_runner
from octavo.engine.engine import Engine
from octavo.engine.load import load_engine
from octavo.engine.requests import make_requests
from weights.gguf_writer import random_llama

PROMPT = (5, 6, 7, 40, 41)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "seeded": {},
    "greedy with penalties": {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "penalties": {"frequency_penalty": 0.9, "repetition_penalty": 1.5, "top_k": 12},
    "masks": {"bad_words_token_ids": ((50, 51), (60,)), "dry_multiplier": 0.8, "dry_allowed_length": 1, "top_k": 9},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": tuple(range(0, 288, 5))},
    "stop token": {"stop_token_ids": tuple(range(0, 288, 20))},
    "stop string": {"stop": ("t", "th", "e", "\u00e4"), "min_tokens": 3},
    "stop string that stays": {"stop": ("e", "a", "7"), "include_stop_str_in_output": True},
}
GUESSES = {"right": [100], "wrong": [0], "half right": [2, 0, 5, 1, 3, 100], "short": [1]}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("model") / "random.gguf"
    random_llama(path, seed=3)
    loaded = load_engine(EngineConfig(model=str(path), max_num_seqs=8, max_model_len=64, block_size=8))
    yield loaded
    loaded.close()


def run(engine: Engine, sampling: SamplingParams, n: int = 1) -> tuple[str, list[Any]]:
    """The request's name, and per choice text, ids, logprobs, how it ended and what was counted."""
    run.count += 1  # type: ignore[attr-defined]
    name = f"r{run.count}"  # type: ignore[attr-defined]
    asked = Submission(request_id=name, prompt_token_ids=PROMPT, sampling=sampling, n=n)
    engine.submit(make_requests(engine.config, asked, arrival_s=0.0))
    outputs: list[list[RequestOutput]] = [[] for _ in range(n)]
    while engine.has_unfinished:
        for output in engine.step():
            outputs[output.choice_index].append(output)
    engine.scheduler.manager.check_integrity()
    return name, [joined(of_choice) for of_choice in outputs]


run.count = 0  # type: ignore[attr-defined]


def joined(outputs: list[RequestOutput]) -> Any:
    last = outputs[-1]
    assert last.usage is not None
    assert all(output.finish_reason is None for output in outputs[:-1])
    return (
        "".join(output.text for output in outputs),
        [token for output in outputs for token in output.token_ids],
        [token for output in outputs for token in output.logprobs or ()],
        (last.finish_reason, last.stop_reason, last.usage.completion_tokens),
    )


def with_and_without(engine: Engine, fields: dict[str, Any], right: list[int], n: int = 3) -> None:
    sampling = SamplingParams(**{"seed": 4, "max_tokens": 24, "ignore_eos": True, "logprobs": 1, **fields})
    _, plain = run(engine, sampling, n)
    # what it would draw if no text ended it: right guesses reach beyond the end
    _, longer = run(engine, replace(sampling, stop=()), n)
    teacher = Teacher({i: ids for i, (_, ids, _, _) in enumerate(longer)}, right)
    steps = engine.tracer.steps()[-1].step_id
    engine.scheduler.drafter = teacher
    try:
        name, drafted = run(engine, sampling, n)
    finally:
        engine.scheduler.drafter = None
    assert drafted == plain
    assert teacher.proposed
    for index, (_, _, _, (_, _, num_tokens)) in enumerate(drafted):
        trace = engine.tracer.request(name if index == 0 else f"{name}#{index}")
        assert trace is not None
        assert trace.num_output_tokens == num_tokens, "the trace counts what usage counts"
    records = engine.tracer.steps(since=steps)
    if right == [100] and max(result[3][2] for result in drafted) == 24:
        assert len(records) < 20, "right guesses save steps"


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_answers_do_not_depend_on_drafts(engine: Engine, name: str, guess: str) -> None:
    with_and_without(engine, SAMPLINGS[name], GUESSES[guess])


@pytest.mark.parametrize("mode", ["mixed", "split"])
def test_answers_do_not_depend_on_drafts_under_preemption(tmp_path_factory: pytest.TempPathFactory, mode: Any) -> None:
    path = tmp_path_factory.mktemp("model") / "random.gguf"
    random_llama(path, seed=3)
    wish = EngineConfig(
        model=str(path), max_num_seqs=8, max_model_len=48, block_size=4, kv_cache_memory=20 << 10, step_mode=mode
    )
    engine = load_engine(wish)
    try:
        for guess in GUESSES.values():
            with_and_without(engine, {"presence_penalty": 0.4, "temperature": 0.8}, guess, n=6)
        assert any(record.preempted for record in engine.tracer.steps())
    finally:
        engine.close()


def test_a_history_that_leaks_is_noticed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    real = model_runner.build_batch

    def leaky(*args: Any) -> Any:
        batch = real(*args)
        batch.history_lens = [length + 1 for length in batch.history_lens]
        return batch

    monkeypatch.setattr(model_runner, "build_batch", leaky)
    for name in ("greedy with penalties", "penalties", "masks"):
        with pytest.raises(AssertionError):
            with_and_without(engine, SAMPLINGS[name], GUESSES["right"])


def test_a_stop_string_that_does_not_cut_a_run_is_noticed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_until_ended", lambda events, endings: events)
    with pytest.raises(AssertionError):
        with_and_without(engine, SAMPLINGS["stop string"], GUESSES["right"])


def test_a_step_that_verifies_counts_as_a_decode(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingParams(seed=4, max_tokens=17, ignore_eos=True)
    _, ((_, ids, _, _),) = run(engine, sampling)
    counted: list[dict[str, Any]] = []
    monkeypatch.setattr(engine.tracer.metrics, "step", lambda **facts: counted.append(facts))
    engine.scheduler.drafter = Teacher({0: ids}, [3])
    try:
        name, _ = run(engine, sampling)
    finally:
        engine.scheduler.drafter = None
    trace = engine.tracer.request(name)
    assert trace is not None
    events = [event for event in trace.events() if event.event == "DECODE_STEP"]
    first = next(event.facts for event in events if "reason" in event.facts)
    assert first == {"start": len(PROMPT), "length": 9, "reason": "verify"}
    assert sum(facts["output_tokens"] for facts in counted) == 17
    assert sum(facts["prompt_tokens"] for facts in counted) <= len(PROMPT)
