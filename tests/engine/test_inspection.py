"""Looking at the engine costs its thread microseconds, however much there is to see."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from starlette.responses import Response
from test_async_engine import Runner, load

from octavo.api import inspections
from octavo.api.inspections import SharedAnswers, json_answer
from octavo.core.config import EngineConfig
from octavo.core.plan import SampledToken, ScheduledChunk, StepPlan, StepResult, TokenEvent
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine import inspection
from octavo.engine.engine import Engine

NUM_STEPS = 8_000


def thread_seconds(call: Callable[[], object]) -> float:
    """CPU time of a call on this thread, the best of five."""
    taken = []
    for _ in range(5):
        started = time.thread_time()
        call()
        taken.append(time.thread_time() - started)
    return min(taken)


def step(engine: Engine, step_id: int, names: tuple[str, ...], reason: str = "decode") -> None:
    chunks = [ScheduledChunk(request_id=n, start=step_id, token_ids=[0], block_tables=(), reason=reason) for n in names]
    token = SampledToken(token_id=1)
    result = StepResult(step_id=step_id, tokens=((token,),) * len(names), forward_s=1e-3)
    events = [TokenEvent(request_id=n, token=token if reason == "decode" else None) for n in names]
    plan = StepPlan(step_id=step_id, chunks=tuple(chunks))
    engine.tracer.step(plan, result, events, step_id * 1e-3)


@pytest.fixture(scope="module")
def busy() -> Engine:
    """Rings that are full, and a request of 8,000 tokens whose company changed at every step."""
    engine = load(Runner())(EngineConfig(block_size=4))
    for name in ("long", "other"):
        asked = Request(
            request_id=name, prompt_token_ids=(1,), sampling=SamplingParams(), max_tokens=9, stop_token_ids=frozenset(),
            seed=0, arrival_s=0.0,
        )  # fmt: skip
        engine.tracer.submitted(asked, 0.0)
    for step_id in range(200):
        step(engine, step_id, ("long",), "budget")
    for step_id in range(200, 200 + NUM_STEPS):
        step(engine, step_id, ("long", "other") if step_id % 2 else ("long",))
    metrics = engine.tracer.metrics
    for index in range(70_000):
        now = 9.0 + index * 1e-6
        metrics.next_tokens(index * 7 % 1009 * 1e-4, now, requests=1 + index % 64)
        metrics.first_token(1.0, now)
        metrics.answered(index % 13, now)
        metrics.step(now=now, duration_s=0.1, prompt_tokens=1, output_tokens=1, preemptions=0)
    engine.clock = lambda: 10.0
    return engine


def test_taking_the_stats_of_full_rings_costs_the_engine_thread_under_a_millisecond(busy: Engine) -> None:
    assert thread_seconds(lambda: inspection.take_stats(busy)) < 1e-3
    found = inspection.take_stats(busy).as_dict(3600.0)
    assert found["itl_s"]["count"] == sum(1 + index % 64 for index in range(70_000 - 65_536, 70_000))
    assert (found["ttft_s"]["count"], found["tpot_s"]["count"], found["step_s"]["count"]) == (4096, 4096, 16384)
    assert found["itl_s"]["p50"] == pytest.approx(0.0504, rel=0.01)


def test_taking_a_life_of_8000_tokens_costs_the_engine_thread_under_a_millisecond(busy: Engine) -> None:
    assert thread_seconds(lambda: inspection.take_lifecycle(busy, "long")) < 1e-3
    trace = busy.tracer.request("long")
    assert trace is not None
    assert thread_seconds(lambda: trace.timings(busy.clock(), NUM_STEPS)) < 1e-3
    assert thread_seconds(lambda: busy.tracer.steps(limit=1)) < 1e-4
    taken = inspection.take_lifecycle(busy, "long")
    assert taken is not None
    life = taken.as_dict()
    names = [event["event"] for event in life["events"]]
    assert names == ["SUBMITTED", "QUEUED", *["PREFILL_CHUNK"] * 200, *["DECODE_STEP"] * NUM_STEPS]
    assert [event["step_id"] for event in life["events"][2:]] == list(range(200 + NUM_STEPS))
    assert life["summary"]["output_tokens"] == life["summary"]["decode_steps"] == NUM_STEPS


def test_a_life_that_was_taken_does_not_grow_with_its_request(busy: Engine) -> None:
    before = inspection.take_lifecycle(busy, "other")
    step(busy, 200 + NUM_STEPS, ("other",))
    step(busy, 201 + NUM_STEPS, ("other",))
    assert before is not None
    assert before.as_dict()["summary"]["decode_steps"] == len(list(before.trace.events())) - 2 == NUM_STEPS // 2
    assert inspection.take_lifecycle(busy, "nobody") is None


def test_equal_questions_share_an_answer_and_one_who_leaves_does_not_take_it_away() -> None:
    async def run() -> None:
        shared, made, release = SharedAnswers(), [], asyncio.Event()

        async def make() -> Response:
            made.append(1)
            await release.wait()
            return await json_answer(lambda: {"steps": [{"a": 1}, {"b": "é"}], "n": None, "empty": []})

        asking = [asyncio.ensure_future(shared.get("1m", make)) for _ in range(10)]
        await asyncio.sleep(0)
        asking.pop(0).cancel()  # the one for whom it is being made
        release.set()
        answers = await asyncio.gather(*asking)
        assert {bytes(answer.body) for answer in answers} == {
            '{"steps":[{"a":1},{"b":"é"}],"n":null,"empty":[]}'.encode()
        }
        assert len({id(answer) for answer in answers}) == len(answers), "headers may be added to each"
        await shared.get("1m", make)
        assert len(made) == 1, "not a second old yet"
        await shared.get("5m", make)
        assert len(made) == 2

    asyncio.run(run())


def test_an_answer_that_is_too_old_or_that_failed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        shared, made = SharedAnswers(), []

        async def make() -> Response:
            made.append(1)
            if len(made) == 1:
                raise ZeroDivisionError
            return await json_answer(dict[str, Any])

        with pytest.raises(ZeroDivisionError):
            await shared.get("1m", make)
        await shared.get("1m", make)
        assert len(made) == 2
        monkeypatch.setattr(inspections, "SHARED_S", -1.0)
        await shared.get("1m", make)
        assert len(made) == 3

    asyncio.run(run())
