"""The thread around the engine, with a runner that has no model: the next token is a function of the position."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, cast

import pytest

from octavo.core.config import EngineConfig, ResolvedConfig
from octavo.core.errors import ConfigError, EngineUnavailable, InvalidRequest, PromptTooLong, QueueFull
from octavo.core.output import RequestOutput
from octavo.core.plan import DrawFailure, SampledToken, StepPlan, StepResult
from octavo.core.request import Submission
from octavo.core.sampling_params import SamplingParams
from octavo.core.steps import Steps
from octavo.engine import async_engine
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.engine import Engine
from octavo.engine.matchers import Matchers
from octavo.engine.request_stream import RequestStream
from octavo.observability.metrics import Metrics
from octavo.observability.trace import Tracer
from octavo.scheduler.scheduler import Scheduler

VOCAB = 128


def encode_steps(text: str) -> Steps[list[int]]:
    yield
    return list(text.encode())


TOKENIZER = SimpleNamespace(
    vocab_size=VOCAB,
    bytes_by_id=[bytes([i]) for i in range(VOCAB)],
    visible_bytes_by_id=[bytes([i]) for i in range(VOCAB)],
    adds_space_prefix=False,
    encode_steps=lambda text, **_: encode_steps(text),
)


class Runner:
    """Token at position p is ``ord("a") + p % 26``. Has knobs to be slow, to raise, to return a bad row."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.raise_for: set[str] = set()
        self.bad_rows: set[str] = set()
        self.failure: DrawFailure = "not_finite"
        self.seen: list[str] = []
        self.closed = False
        self.notify_fd = -1
        self.matchers = Matchers()
        self.waiting = threading.Event()
        self.dies = False

    def execute(self, plan: StepPlan) -> StepResult:
        self.waiting.set()
        if self.notify_fd >= 0:
            os.write(self.notify_fd, b"\0")
        self.gate.wait(10)
        if self.dies:
            raise SystemExit("the thread dies")
        self.seen += [chunk.request_id for chunk in plan.chunks]
        if any(chunk.request_id in self.raise_for for chunk in plan.chunks):
            raise RuntimeError("the kernel fell over")
        failed: dict[int, DrawFailure] = {
            i: self.failure for i, chunk in enumerate(plan.chunks) if chunk.request_id in self.bad_rows
        }
        tokens = tuple(
            () if chunk.draw is None or i in failed else (SampledToken(token_id=ord("a") + chunk.end % 26),)
            for i, chunk in enumerate(plan.chunks)
        )
        return StepResult(step_id=plan.step_id, tokens=tokens, failed=failed, forward_s=1e-4)

    def close(self) -> None:
        self.closed = True


def load(runner: Runner) -> Callable[[EngineConfig], Engine]:
    def build(wish: EngineConfig) -> Engine:
        config = ResolvedConfig(
            wish=wish, model_path="", model_name="toy", backend="none", device="none", dtype="", kv_dtype="", threads=1,
            max_model_len=64, max_num_seqs=wish.max_num_seqs, block_size=4, cache_groups=(("full", 64),),
            kv_cache_bytes=0, vocab_size=VOCAB, eos_token_ids=frozenset({0}), system_fingerprint="",
            chat_template="missing",
        )  # fmt: skip
        return Engine(
            config=config,
            tokenizer=cast(Any, TOKENIZER),
            chat_template=None,
            scheduler=Scheduler.from_config(wish, num_blocks=config.num_blocks, max_model_len=config.max_model_len),
            runner=cast(Any, runner),
            tracer=Tracer(Metrics()),
        )

    return build


def asked(prompt: Sequence[int], sampling: SamplingParams, **fields: Any) -> Submission:
    return Submission(prompt_token_ids=prompt, sampling=sampling, **fields)


def with_engine(test: Callable[[AsyncEngine, Runner], Awaitable[None]], **wish: Any) -> None:
    """Run ``test`` on a started engine; afterwards everything must be free and the bookkeeping clean."""

    async def run() -> None:
        runner = Runner()
        engine = AsyncEngine(EngineConfig(block_size=4, **wish), load=load(runner))
        await engine.start()
        try:
            await test(engine, runner)
            if engine.state != "dead":
                await engine.inspect(lambda e: e.scheduler.manager.check_integrity())
        finally:
            runner.gate.set()
            await engine.stop()
        assert runner.closed

    asyncio.run(run())


async def collect(stream: RequestStream) -> list[RequestOutput]:
    return [output async for outputs in stream for output in outputs]


def params(max_tokens: int = 5, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **fields)


def test_many_requests_at_once_each_get_their_own_tokens() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        lengths = range(1, 30)
        streams = [engine.submit(asked([9] * n, params(), request_id=f"r{n}")) for n in lengths]
        for n, outputs in zip(lengths, await asyncio.gather(*map(collect, streams)), strict=True):
            assert "".join(o.text for o in outputs) == "".join(chr(ord("a") + (n + i) % 26) for i in range(5))
            assert outputs[-1].finish_reason == "length"
            assert outputs[-1].usage is not None
            assert outputs[-1].usage.completion_tokens == 5
            assert outputs[-1].timings is not None

    with_engine(test)


def test_many_new_sequences_come_in_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "INBOX_S", 0.0)  # one call between two steps
    submit, step = Engine.submit, Engine.step
    num_new = [0]

    def counting_submit(loaded: Engine, requests: Any) -> None:
        num_new[-1] += len(requests)
        submit(loaded, requests)

    def counting_step(loaded: Engine) -> list[RequestOutput]:
        num_new.append(0)
        return step(loaded)

    monkeypatch.setattr(Engine, "submit", counting_submit)
    monkeypatch.setattr(Engine, "step", counting_step)

    async def test(engine: AsyncEngine, runner: Runner) -> None:
        runner.gate.clear()
        first = asyncio.create_task(collect(engine.submit(asked([1], params(60), request_id="first"))))
        await asyncio.to_thread(runner.waiting.wait)
        many = [engine.submit(asked([2], params(1), request_id=f"r{i}", n=4)) for i in range(20)]
        runner.gate.set()
        for stream in many:
            assert len(await collect(stream)) == 4
        await first

    with_engine(test)
    assert sum(num_new) == 81
    assert max(num_new) == 4


def test_five_hundred_choices_with_long_stop_strings_hold_nobody_and_leave_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """32 prompts x n = 16, each choice with sixteen stops of 1,024 characters: a request of 17 kB."""
    stops = tuple("a" * 1023 + chr(ord("a") + index) for index in range(16))
    empty_inbox, seconds = AsyncEngine._empty_inbox, [0.0]

    def timed(engine: AsyncEngine, loaded: Engine) -> None:
        start = time.thread_time()
        empty_inbox(engine, loaded)
        seconds.append(time.thread_time() - start)

    monkeypatch.setattr(AsyncEngine, "_empty_inbox", timed)

    async def test(engine: AsyncEngine, runner: Runner) -> None:
        async def attack(name: str) -> None:
            sampling = params(1, stop=stops)
            await asyncio.gather(
                *(collect(engine.submit(asked([1, 2], sampling, request_id=f"{name}-{i}", n=16))) for i in range(32))
            )

        await attack("warm")
        tracemalloc.start()
        try:
            await engine.inspect(lambda loaded: loaded.tracer._ended.clear())  # what is kept on purpose
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            await attack("attack")
            _, peak = tracemalloc.get_traced_memory()
            await engine.inspect(lambda loaded: loaded.tracer._ended.clear())
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak - before < 8 << 20
        assert after - before < 1 << 20

    with_engine(test)
    assert sorted(seconds)[-3] < 0.005  # 1 ms, and the call under way; the rest is for a collection of garbage


def test_choices_are_interleaved_and_each_ends_once() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        outputs = await collect(engine.submit(asked([1, 2, 3], params(), request_id="r", n=3)))
        ends = [o.choice_index for o in outputs if o.finish_reason]
        assert sorted(ends) == [0, 1, 2]

    with_engine(test)


def test_leaving_a_stream_ends_its_request_before_the_next_step() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        stream = engine.submit(asked([1], params(60), request_id="r"))
        async with aclosing(stream):
            await anext(stream)
        steps_before = await engine.inspect(lambda e: e.tracer.metrics.steps)
        pinned, steps = await engine.inspect(
            lambda e: (e.scheduler.manager.stats().pinned_blocks, e.tracer.metrics.steps)
        )
        assert (pinned, steps) == (0, steps_before), "nothing ran after the abort"
        stream.abort()  # twice is fine
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    with_engine(test)


@pytest.mark.parametrize("when", ["before the first step", "while all choices run", "when one has ended"])
def test_leaving_a_stream_of_several_choices_ends_every_one(when: str) -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        runner.gate.clear()
        stream = engine.submit(asked([1, 2, 3], params(50), request_id="r", n=3))
        together, execute = threading.Event(), runner.execute

        def execute_and_hold(plan: StepPlan) -> StepResult:
            if len(plan.chunks) == 3 and not together.is_set():
                runner.gate.clear()
                together.set()
            return execute(plan)

        if when != "before the first step":
            runner.execute = execute_and_hold  # type: ignore[method-assign]
            runner.gate.set()
            await asyncio.to_thread(together.wait, 10)
        expected, ended = {"r", "r#1", "r#2"}, list[str]()

        def end_one(loaded: Engine) -> None:
            loaded.finish("r#1", "abort")

        if when == "when one has ended":
            expected.remove("r#1")
            engine._post(end_one)

        def note_ends(loaded: Engine) -> None:
            finish = loaded.finish

            def finish_and_note(request_id: str, reason: Any) -> Any:
                event = finish(request_id, reason)
                ended.extend([request_id] if event is not None else [])
                return event

            loaded.finish = finish_and_note  # type: ignore[method-assign]

        engine._post(note_ends)
        stream.abort()
        runner.gate.set()
        running = await engine.inspect(lambda e: (e.scheduler.num_running, e.scheduler.num_waiting))
        assert running == (0, 0)
        assert set(ended) == expected
        assert engine._streams == {}
        assert (await engine.inspect(lambda e: e.scheduler.manager.stats())).pinned_blocks == 0
        await collect(engine.submit(asked([1, 2, 3], params(), request_id="r", n=3)))  # the ids are free again

    with_engine(test)


def test_a_last_output_arrives_although_all_others_leave_in_the_same_step() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        runner.gate.clear()
        ending, leaving = (
            engine.submit(asked([1], params(5), request_id="a")),
            engine.submit(asked([2], params(60), request_id="b")),
        )
        loop, execute = asyncio.get_running_loop(), runner.execute

        def leave() -> None:
            leaving.abort()
            left.set()

        def execute_and_leave(plan: StepPlan) -> StepResult:
            if any(chunk.request_id == "a" and chunk.end == 5 for chunk in plan.chunks):
                loop.call_soon_threadsafe(leave)
                left.wait(5)
            return execute(plan)

        left = threading.Event()
        runner.execute = execute_and_leave  # type: ignore[method-assign]
        runner.gate.set()
        outputs = await asyncio.wait_for(collect(ending), 5)
        assert outputs[-1].finish_reason == "length"

    with_engine(test)


def test_a_stop_string_ends_a_request_before_the_next_step() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        outputs = await collect(engine.submit(asked([1], params(50, stop=("ef",)), request_id="r")))
        assert "".join(o.text for o in outputs) == "bcd"
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", "ef")
        assert runner.seen.count("r") == 5, "one step per token drawn: b c d e f"
        ended = await engine.inspect(lambda e: dict(e.tracer.metrics.requests_ended))
        assert ended == {"stop": 1, "length": 0, "abort": 0, "error": 0}

    with_engine(test)


def test_a_stop_string_in_the_last_token_allowed_counts_as_a_stop_everywhere() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        outputs = await collect(engine.submit(asked([1], params(5, stop=("ef",)), request_id="r")))
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", "ef")

        def recorded(loaded: Engine) -> tuple[dict[str, int], Any]:
            trace = loaded.tracer.request("r")
            assert trace is not None
            return dict(loaded.tracer.metrics.requests_ended), trace.events()

        ended, events = await engine.inspect(recorded)
        assert ended == {"stop": 1, "length": 0, "abort": 0, "error": 0}
        assert [event.facts for event in events if event.event == "FINISHED"] == [
            {"reason": "stop", "stop_reason": "ef"}
        ]

    with_engine(test)


def test_one_bad_row_fails_one_request_only() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        runner.gate.clear()
        runner.bad_rows.add("bad")
        good, bad = (engine.submit(asked([1], params(), request_id=name)) for name in ("good", "bad"))
        runner.gate.set()
        outputs = await asyncio.gather(collect(good), collect(bad))
        assert outputs[0][-1].finish_reason == "length"
        assert outputs[1][-1].finish_reason == "error"
        assert "not finite" in str(outputs[1][-1].stop_reason)

    with_engine(test)


def test_a_step_that_raises_fails_its_requests_and_the_engine_goes_on() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        runner.raise_for.add("bad")
        outputs = await collect(engine.submit(asked([1], params(), request_id="bad")))
        assert outputs[-1].finish_reason == "error"
        assert "the kernel fell over" in str(outputs[-1].stop_reason)
        outputs = await collect(engine.submit(asked([1], params(), request_id="good")))
        assert outputs[-1].finish_reason == "length"
        assert engine.state == "ready"

    with_engine(test)


def test_a_dead_engine_fails_every_stream_and_refuses_new_ones() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        runner.gate.clear()
        stream = engine.submit(asked([1], params(), request_id="r"))

        def break_it(loaded: Engine) -> None:
            loaded.scheduler.plan = None  # type: ignore[assignment, method-assign]
            loaded.scheduler.restart = None  # type: ignore[assignment, method-assign]

        pending = asyncio.ensure_future(engine.inspect(break_it))
        await asyncio.sleep(0)
        runner.gate.set()
        await pending
        with pytest.raises(EngineUnavailable, match="dead"):
            await collect(stream)
        assert engine.state == "dead"
        with pytest.raises(EngineUnavailable, match="NoneType"):
            engine.submit(asked([1], params(), request_id="again"))

    with_engine(test)


def test_what_cannot_be_served_is_refused_before_it_is_queued() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        with pytest.raises(PromptTooLong):
            engine.submit(asked([1] * 65, params(), request_id="r"))
        with pytest.raises(InvalidRequest, match="token id 128"):
            engine.submit(asked([128], params(), request_id="r"))
        with pytest.raises(InvalidRequest, match="n is 17"):
            engine.submit(asked([1], params(), request_id="r", n=17))
        with pytest.raises(InvalidRequest, match="chat template is missing"):
            await engine.encode_chat([{"role": "user", "content": "hi"}])
        runner.gate.clear()
        stream = engine.submit(asked([1], params(), request_id="r"))
        with pytest.raises(InvalidRequest, match="in use"):
            engine.submit(asked([1], params(), request_id="r"))
        runner.gate.set()
        await collect(stream)

    with_engine(test)


def test_an_id_that_a_choice_of_another_request_has_is_refused() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        runner.gate.clear()
        streams = [
            engine.submit(asked([1], params(), request_id="r", n=2)),
            engine.submit(asked([1], params(), request_id="q#1")),
        ]
        with pytest.raises(InvalidRequest, match="'r#1' is in use"):
            engine.submit(asked([1], params(), request_id="r#1"))
        with pytest.raises(InvalidRequest, match="'q#1' is in use"):
            engine.submit(asked([1], params(), request_id="q", n=2))
        runner.gate.set()
        await asyncio.gather(*map(collect, streams))
        assert engine.state == "ready"

    with_engine(test)


def test_a_request_whose_text_cannot_be_made_fails_alone() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        runner.gate.clear()
        good, bad = (engine.submit(asked([1], params(), request_id=name)) for name in ("good", "bad"))

        def spoil(loaded: Engine) -> None:
            loaded.processor._sequences["bad"].detokenizer._bytes_by_id = cast(Any, None)

        pending = asyncio.ensure_future(engine.inspect(spoil))
        await asyncio.sleep(0)
        runner.gate.set()
        await pending
        outputs = await asyncio.gather(collect(good), collect(bad))
        assert outputs[0][-1].finish_reason == "length"
        assert outputs[1][-1].finish_reason == "error"
        assert engine.state == "ready"
        ended = await engine.inspect(lambda e: dict(e.tracer.metrics.requests_ended))
        assert ended == {"stop": 0, "length": 1, "abort": 0, "error": 1}

    with_engine(test)


@pytest.mark.parametrize("end", ["it stops", "its thread dies"])
def test_whoever_waits_to_inspect_an_engine_that_ends_is_told(end: str) -> None:
    async def run() -> None:
        runner = Runner()
        engine = AsyncEngine(EngineConfig(block_size=4), load=load(runner))
        await engine.start()
        runner.gate.clear()
        stream = engine.submit(asked([1], params(60), request_id="r"))
        await asyncio.to_thread(runner.waiting.wait, 10)
        runner.dies = end == "its thread dies"
        pending = asyncio.ensure_future(engine.inspect(lambda e: None))
        await asyncio.sleep(0)
        stopping = asyncio.ensure_future(engine.stop()) if end == "it stops" else None
        await asyncio.sleep(0)
        runner.gate.set()
        with pytest.raises(EngineUnavailable):
            await asyncio.wait_for(pending, 5)
        with pytest.raises(EngineUnavailable):
            await asyncio.wait_for(engine.inspect(lambda e: None), 5)
        with pytest.raises(EngineUnavailable):
            await collect(stream)
        await (stopping or engine.stop())

    asyncio.run(run())


def test_a_full_queue_refuses_and_opens_again() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        runner.gate.clear()
        streams = [engine.submit(asked([1], params(), request_id=f"r{i}")) for i in range(3)]
        with pytest.raises(QueueFull, match="limit is 3"):
            engine.submit(asked([1], params(), request_id="one more"))
        runner.gate.set()
        await asyncio.gather(*map(collect, streams))
        await collect(engine.submit(asked([1], params(), request_id="later")))

    with_engine(test, max_num_seqs=1, max_queue=2)


def test_each_choice_of_a_request_takes_its_place_in_the_queue() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        runner.gate.clear()
        three = engine.submit(asked([1], params(), request_id="three", n=3))
        with pytest.raises(QueueFull, match="3 sequences are in the engine; the limit is 4"):
            engine.submit(asked([1], params(), request_id="two", n=2))
        one = engine.submit(asked([1], params(), request_id="one"))
        with pytest.raises(QueueFull, match="4 sequences"):
            engine.submit(asked([1], params(), request_id="another"))
        runner.gate.set()
        await asyncio.gather(collect(three), collect(one))

    with_engine(test, max_num_seqs=1, max_queue=3)


def test_draining_finishes_what_runs_and_refuses_the_rest() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        runner.gate.clear()
        stream = engine.submit(asked([1], params(), request_id="r"))
        drain = asyncio.ensure_future(engine.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable, match="draining"):
            engine.submit(asked([1], params(), request_id="late"))
        runner.gate.set()
        outputs = await collect(stream)
        await drain
        assert outputs[-1].finish_reason == "length"

    with_engine(test)


def test_draining_gives_up_after_its_time() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        runner.gate.clear()
        stream = engine.submit(asked([1], params(), request_id="r"))
        await engine.drain(0.05)
        assert engine._streams, "it did not wait for the end"
        runner.gate.set()
        stream.abort()

    with_engine(test)


def test_an_error_inside_inspect_reaches_the_caller_and_nobody_else() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        with pytest.raises(ZeroDivisionError):
            await engine.inspect(lambda e: 1 // 0)
        assert engine.state == "ready"

    with_engine(test)


def test_text_is_encoded_off_the_loop() -> None:
    async def test(engine: AsyncEngine, runner: Runner) -> None:
        assert await engine.encode(["ab", "c"]) == [[97, 98], [99]]

    with_engine(test)


def test_a_load_that_fails_says_why_and_leaves_a_dead_engine() -> None:
    async def run() -> None:
        def fail(wish: EngineConfig) -> Engine:
            raise ConfigError("no such thing")

        engine = AsyncEngine(EngineConfig(), load=fail)
        with pytest.raises(EngineUnavailable, match="loading"):
            _ = engine.config
        with pytest.raises(ConfigError, match="no such thing"):
            await engine.start()
        assert engine.state == "dead"
        with pytest.raises(EngineUnavailable, match="no such thing"):
            engine.submit(asked([1], params(), request_id="r"))
        await engine.stop()

    asyncio.run(run())
