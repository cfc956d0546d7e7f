"""Something raises at each stage of the engine thread: whom it costs an answer, and that nobody else notices."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from test_async_engine import Runner, asked, collect, params, with_engine

from octavo.core.errors import RequestFailed
from octavo.core.output import RequestOutput
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.engine import Engine

NUM_TOKENS = 6


class RaisesAt:
    """In place of a method: the real one, but for its ``call``-th call (from 1), which raises instead, or half-way."""

    def __init__(self, owner: object, name: str, call: int, error: type[BaseException], *, afterwards: bool) -> None:
        self._real = getattr(owner, name)
        self._left, self._error, self._afterwards = call, error, afterwards
        self.raised = False
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._left -= 1
        if self._left != 0:
            return self._real(*args, **kwargs)
        if self._afterwards:
            self._real(*args, **kwargs)
        self.raised = True
        raise self._error("planted")


def whole(e: Engine) -> Any:
    return e


def scheduler(e: Engine) -> Any:
    return e.scheduler


def manager(e: Engine) -> Any:
    return e.scheduler.manager


def tracer(e: Engine) -> Any:
    return e.tracer


def processor(e: Engine) -> Any:
    return e.processor


#: stage -> (whose method, its name, which call of it, how many of the two requests that run it may cost at most)
STAGES: dict[str, tuple[Callable[[Engine], Any], str, int, int]] = {
    "plan": (scheduler, "plan", 3, 0),
    "plan, a step that admits": (manager, "open", 2, 0),
    "plan, growing a table": (manager, "grow", 4, 0),
    "plan, sizing chunks": (lambda e: e.scheduler._sizer, "begin", 1, 0),
    "plan, choosing whom": (lambda e: e.scheduler._policy, "remove", 2, 0),
    "execute": (lambda e: e.runner, "execute", 3, 2),
    "apply": (scheduler, "apply", 3, 2),
    "apply, committing": (manager, "commit", 2, 2),
    "apply, releasing": (manager, "release", 1, 2),
    "apply, learning from the time": (lambda e: e.scheduler._sizer, "observe", 2, 2),
    "text": (processor, "process", 3, 2),
    "text of one request": (processor, "_process_one", 1, 1),
    "the end of one request's text": (processor, "_last_output", 1, 1),
    "facts": (whole, "_with_facts", 1, 0),
    "trace of a step": (tracer, "step", 3, 0),
    "trace of a submission": (tracer, "submitted", 2, 0),
    "trace of an end": (tracer, "finished", 1, 0),
    "metrics": (lambda e: e.tracer.metrics, "step", 2, 0),
    "clock": (whole, "clock", 9, 2),
}


def wanted(prompt: int) -> str:
    return "".join(chr(ord("a") + (prompt + i) % 26) for i in range(NUM_TOKENS))


def told(outputs: list[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


def leak_nothing(e: Engine) -> None:
    e.scheduler.manager.check_integrity()
    assert e.scheduler.manager.stats().pinned_blocks == 0
    assert not e.has_unfinished
    assert e.scheduler._open is None
    assert not e.tracer._live, "a trace of an ended request is still live"
    assert not e.processor._sequences, "the text of an ended request is still kept"


@pytest.mark.parametrize("afterwards", [False, True], ids=["instead", "afterwards"])
@pytest.mark.parametrize("error", [MemoryError, RecursionError, AssertionError])
@pytest.mark.parametrize("stage", STAGES)
def test_an_error_at_any_stage_ends_what_it_concerns_and_neighbours_get_their_tokens(
    stage: str, error: type[BaseException], afterwards: bool
) -> None:
    owner, name, call, cost = STAGES[stage]

    async def test(engine: AsyncEngine, runner: Runner) -> None:
        planted = RaisesAt(owner(engine.loaded), name, call, error, afterwards=afterwards)
        # prompts of another length each: two run at once, the others wait
        lengths = (3, 5, 7, 9, 11)
        streams = [engine.submit(asked([n] * n, params(NUM_TOKENS), request_id=f"r{n}")) for n in lengths]
        results = [await asyncio.wait_for(collect(stream), 10) for stream in streams]
        assert planted.raised, "the stage was not reached, or this test says nothing"
        failed = 0
        for n, outputs in zip(lengths, results, strict=True):
            if outputs[-1].finish_reason == "error":
                failed += 1
                assert wanted(n).startswith(told(outputs)), "what was told before is right"
            else:
                assert (outputs[-1].finish_reason, told(outputs)) == ("length", wanted(n))
        assert failed <= cost
        assert engine.state == "ready"
        assert told(await collect(engine.submit(asked([2], params(NUM_TOKENS), request_id="later")))) == wanted(1)
        await engine.inspect(leak_nothing)

    with_engine(test, max_num_seqs=2)


@pytest.mark.parametrize("name", ["fail_step", "restart"])
def test_an_error_while_an_error_is_dealt_with_ends_requests_and_not_the_thread(name: str) -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        loaded = engine.loaded
        if name == "fail_step":
            RaisesAt(runner, "execute", 2, MemoryError, afterwards=False)
        else:
            RaisesAt(loaded.scheduler, "plan", 2, MemoryError, afterwards=False)
        planted = RaisesAt(loaded.scheduler, name, 1, MemoryError, afterwards=False)
        streams = [engine.submit(asked([n] * n, params(NUM_TOKENS), request_id=f"r{n}")) for n in (1, 2)]
        for n, stream in enumerate(streams, 1):
            try:
                outputs = await asyncio.wait_for(collect(stream), 10)
                assert outputs[-1].finish_reason == "error" or told(outputs) == wanted(n)
            except RequestFailed as error:
                assert "planted" in str(error)  # noqa: PT017 - either is right
        assert planted.raised
        assert engine.state == "ready"
        assert told(await collect(engine.submit(asked([2], params(NUM_TOKENS), request_id="later")))) == wanted(1)
        await engine.inspect(leak_nothing)

    with_engine(test, max_num_seqs=1)


def test_a_plan_that_raises_every_time_fails_everybody_and_leaves_the_engine_ready() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        def raise_always(now: float) -> None:
            raise ValueError("no plan")

        plan, engine.loaded.scheduler.plan = engine.loaded.scheduler.plan, raise_always  # type: ignore
        streams = [engine.submit(asked([n], params(), request_id=f"r{n}")) for n in range(3)]
        for stream in streams:
            outputs = await asyncio.wait_for(collect(stream), 10)
            assert outputs[-1].finish_reason == "error"
            assert "no plan" in str(outputs[-1].stop_reason)
        engine.loaded.scheduler.plan = plan  # type: ignore[method-assign]
        assert told(await collect(engine.submit(asked([2], params(NUM_TOKENS), request_id="later")))) == wanted(1)
        await engine.inspect(leak_nothing)

    with_engine(test)


@pytest.mark.parametrize("afterwards", [False, True], ids=["instead", "afterwards"])
@pytest.mark.parametrize(
    ("owner", "name", "call"), [(scheduler, "add", 2), (processor, "add", 2), (whole, "_queue", 1)]
)
def test_a_call_that_cannot_be_queued_fails_whole_and_alone(
    owner: Callable[[Engine], Any], name: str, call: int, afterwards: bool
) -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        runner.gate.clear()
        before = engine.submit(asked([1], params(NUM_TOKENS), request_id="before"))
        await asyncio.to_thread(runner.waiting.wait, 10)
        RaisesAt(owner(engine.loaded), name, call, MemoryError, afterwards=afterwards)
        failing = engine.submit(asked([1, 2], params(NUM_TOKENS), request_id="failing", n=3))
        after = engine.submit(asked([1, 2, 3], params(NUM_TOKENS), request_id="after"))
        runner.gate.set()
        with pytest.raises(RequestFailed, match="could not be queued: MemoryError: planted"):
            await asyncio.wait_for(collect(failing), 10)
        assert told(await collect(before)) == wanted(1)
        assert told(await collect(after)) == wanted(3)
        await engine.inspect(leak_nothing)

    with_engine(test)


@pytest.mark.parametrize("afterwards", [False, True], ids=["instead", "afterwards"])
@pytest.mark.parametrize(
    ("owner", "name"), [(scheduler, "finish"), (manager, "release"), (processor, "process"), (tracer, "finished")]
)
def test_an_abort_that_raises_still_ends_its_request_and_gives_its_blocks_back(
    owner: Callable[[Engine], Any], name: str, afterwards: bool
) -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        runner.gate.clear()
        leaving = engine.submit(asked([1, 2], params(50), request_id="leaving"))
        staying = engine.submit(asked([1], params(NUM_TOKENS), request_id="staying"))
        await asyncio.to_thread(runner.waiting.wait, 10)

        def plant(loaded: Engine) -> None:
            planted.append(RaisesAt(owner(loaded), name, 1, MemoryError, afterwards=afterwards))
            loaded.abort("leaving")

        planted: list[RaisesAt] = []
        asking = asyncio.ensure_future(engine.inspect(plant))
        await asyncio.sleep(0)
        runner.gate.set()
        await asking
        assert planted[0].raised
        leaving.abort()
        assert told(await asyncio.wait_for(collect(staying), 10)) == wanted(1)
        await engine.inspect(leak_nothing)

    with_engine(test)


def test_an_inspection_that_raises_costs_its_answer_only() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        stream = engine.submit(asked([1], params(NUM_TOKENS), request_id="r"))

        def fail(loaded: Engine) -> None:
            raise MemoryError("planted")

        with pytest.raises(MemoryError, match="planted"):
            await engine.inspect(fail)
        assert told(await collect(stream)) == wanted(1)

    with_engine(test)


def test_books_that_are_found_wrong_while_idle_are_begun_again() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        await collect(engine.submit(asked([1] * 9, params(NUM_TOKENS), request_id="r")))

        def spoil_and_idle(loaded: Engine) -> None:
            loaded.scheduler.manager._blocks[0].pool._refs[3] += 1
            loaded._checked_s = float("-inf")
            loaded.idle()

        await engine.inspect(spoil_and_idle)
        await engine.inspect(leak_nothing)
        assert told(await collect(engine.submit(asked([2], params(NUM_TOKENS), request_id="later")))) == wanted(1)

    with_engine(test)


def test_an_error_in_a_turn_that_belongs_to_nobody_ends_all_requests_and_not_the_thread() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        runner.gate.clear()
        streams = [engine.submit(asked([n + 1], params(NUM_TOKENS), request_id=f"r{n}", n=2)) for n in range(3)]
        await asyncio.to_thread(runner.waiting.wait, 10)
        planted = RaisesAt(asyncio.get_running_loop(), "call_soon_threadsafe", 1, OSError, afterwards=False)
        runner.gate.set()
        for n, stream in enumerate(streams):
            try:  # what was on its way to the loop may still arrive, and is then right
                outputs = await asyncio.wait_for(collect(stream), 10)
                assert [told([o for o in outputs if o.choice_index == i]) for i in range(2)] == [wanted(1)] * 2, n
            except RequestFailed as error:
                assert str(error) == "the engine failed: OSError: planted"  # noqa: PT017 - either is right
        assert planted.raised
        assert engine.state == "ready"
        assert told(await collect(engine.submit(asked([2], params(NUM_TOKENS), request_id="later")))) == wanted(1)
        await engine.inspect(leak_nothing)

    with_engine(test)


def test_one_inspection_at_most_comes_between_two_steps() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        runner.gate.clear()
        stream = engine.submit(asked([1], params(60), request_id="r"))
        await asyncio.to_thread(runner.waiting.wait, 10)
        asking = [asyncio.ensure_future(engine.inspect(lambda e: e.tracer.metrics.steps)) for _ in range(20)]
        gone = asyncio.ensure_future(engine.inspect(lambda e: pytest.fail("nobody waits for this")))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        runner.gate.set()
        seen = await asyncio.gather(*asking)
        assert seen == list(range(seen[0], seen[0] + 20)), "a step lies between any two of them"
        assert told(await collect(stream)).startswith(wanted(1))

    with_engine(test)


def test_inspections_are_answered_one_after_the_other_by_an_idle_engine() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        names = await asyncio.gather(*(engine.inspect(lambda e: threading.current_thread().name) for _ in range(50)))
        assert set(names) == {"octavo-engine"}

    with_engine(test)
