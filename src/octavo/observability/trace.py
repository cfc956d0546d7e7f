"""Facts of what happened: a ring of steps, and the life of each request.

Written by the engine thread only; other threads read it between steps (``AsyncEngine.inspect``).
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Literal, overload

from octavo.core.output import Timings
from octavo.core.plan import (
    Admission,
    BudgetFacts,
    FinishReason,
    ScheduledChunk,
    StepPlan,
    StepResult,
    TokenEvent,
)
from octavo.core.records import hot_record
from octavo.core.request import Request
from octavo.observability.metrics import Metrics

EventName = Literal[
    "SUBMITTED", "QUEUED", "ADMITTED", "PREFILL_CHUNK", "DECODE_STEP", "PREEMPTED", "FINISHED", "ABORTED", "FAILED"
]
WAITING_KEPT = 64  # of a step's reasons for not admitting, in order of the queue; thousands of steps are kept
_ONE = array("i", [1])
_NO_RESULT = StepResult(step_id=-1, tokens=())  # of a step that failed
_TERMINAL: dict[str, EventName] = {"stop": "FINISHED", "length": "FINISHED", "abort": "ABORTED", "error": "FAILED"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleEvent:
    """One thing that happened to a request. ``t_s`` counts from its arrival."""

    event: EventName
    t_s: float
    step_id: int | None = None
    facts: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRecord:
    """What a step ran for one request: positions [start, start + length)."""

    request_id: str
    start: int
    length: int
    reason: str


class StepChunks(Sequence[ChunkRecord]):
    """The chunks of a step, kept as columns: thousands of steps of many sequences are kept, few are looked at."""

    __slots__ = ("lengths", "reasons", "request_ids", "starts")

    def __init__(
        self, request_ids: tuple[str, ...], starts: array[int], lengths: array[int], reasons: tuple[str, ...]
    ) -> None:
        self.request_ids = request_ids
        self.starts = starts
        self.lengths = lengths
        self.reasons = reasons

    @classmethod
    def of(cls, chunks: Sequence[ScheduledChunk]) -> StepChunks:
        return cls(
            tuple([chunk.request_id for chunk in chunks]),
            array("i", [chunk.start for chunk in chunks]),
            array("i", [len(chunk.token_ids) for chunk in chunks]),
            tuple([chunk.reason for chunk in chunks]),
        )

    @classmethod
    def of_decodes(cls, request_ids: tuple[str, ...], chunks: Sequence[ScheduledChunk]) -> StepChunks:
        """The same where all chunks, which are those of these requests, are decodes."""
        count = len(chunks)
        return cls(request_ids, array("i", [chunk.start for chunk in chunks]), _ONE * count, ("decode",) * count)

    def __len__(self) -> int:
        return len(self.request_ids)

    @overload
    def __getitem__(self, index: int) -> ChunkRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ChunkRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> ChunkRecord | tuple[ChunkRecord, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        return ChunkRecord(
            request_id=self.request_ids[index],
            start=self.starts[index],
            length=self.lengths[index],
            reason=self.reasons[index],
        )


@hot_record
class StepRecord:
    """One step of the engine, without views: safe to keep."""

    step_id: int
    t_s: float  # end of the step, monotonic clock
    chunks: StepChunks
    budget: BudgetFacts | None
    admitted: tuple[Admission, ...]
    preempted: tuple[str, ...]
    waiting_for: Mapping[str, str]
    evicted: int
    num_block_copies: int
    num_waiting: int
    num_running: int
    free_blocks: int
    build_s: float
    forward_s: float
    sample_s: float
    failed: bool
    gil_wait_s: float = 0.0  # of build_s: see StepResult

    @property
    def step_s(self) -> float:
        return self.build_s + self.forward_s + self.sample_s


class DecodeRun:
    """Steps, one after the other, in which the same requests decoded. Their traces share it: two numbers a step."""

    __slots__ = ("request_ids", "step_ids", "times")

    def __init__(self, request_ids: tuple[str, ...]) -> None:
        self.request_ids = request_ids
        self.step_ids = array("q")
        self.times = array("d")  # ends of the steps, monotonic clock

    def add(self, step_id: int, now: float) -> None:
        self.step_ids.append(step_id)
        self.times.append(now)

    def __len__(self) -> int:
        return len(self.times)


class RequestTrace:
    """The life of one request. Its decode steps are those of its runs, which it shares with its batch mates.

    A token drawn in the first step of a run, or in a step that is no decode step, is noted here one by one
    (``add_token``); those of a run's further steps follow from the run.
    """

    __slots__ = (
        "_events",
        "_latest_s",
        "_noted_tokens",
        "_num_run_steps",
        "_runs",
        "admitted_s",
        "arrival_s",
        "cached_tokens",
        "client",
        "ended_s",
        "finish_reason",
        "first_token_s",
        "num_prompt_tokens",
        "request_id",
    )

    def __init__(self, request: Request) -> None:
        # Facts, not the request: thousands of ended requests are remembered, and their prompts would add up.
        self.request_id = request.request_id
        self.client = request.client
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.arrival_s = request.arrival_s
        self._events: list[LifecycleEvent] = []
        self._runs: list[DecodeRun] = []
        self._noted_tokens = 0
        self._num_run_steps = 0  # of all runs but the last
        self._latest_s = self.arrival_s  # when the latest of them was drawn
        self.admitted_s: float | None = None  # first admission, monotonic clock
        self.cached_tokens = 0  # at first admission
        self.first_token_s: float | None = None
        self.ended_s: float | None = None
        self.finish_reason: FinishReason | None = None

    def add(self, event: EventName, now: float, step_id: int | None = None, **facts: object) -> None:
        self._events.append(LifecycleEvent(event=event, t_s=now - self.arrival_s, step_id=step_id, facts=facts))

    def add_run(self, run: DecodeRun) -> None:
        """It decodes in the steps of this run, which has its first. The run before it will get no more."""
        self._latest_s = self.latest_token_s
        if self._runs:
            self._num_run_steps += len(self._runs[-1])
        self._runs.append(run)

    def add_token(self, now: float) -> float:
        """One more token -> seconds since the one before it, or since the arrival."""
        gap = now - self.latest_token_s
        self._noted_tokens += 1
        self._latest_s = now
        if self.first_token_s is None:
            self.first_token_s = now
        return gap

    @property
    def num_output_tokens(self) -> int:
        return self._noted_tokens + self.num_decode_steps - len(self._runs)

    @property
    def num_decode_steps(self) -> int:
        return self._num_run_steps + (len(self._runs[-1]) if self._runs else 0)

    @property
    def latest_token_s(self) -> float:
        """When its latest token was drawn, monotonic clock; before the first, its arrival."""
        if self._runs and len(self._runs[-1]) > 1:
            return max(self._latest_s, self._runs[-1].times[-1])
        return self._latest_s

    def __len__(self) -> int:
        return len(self._events) + self.num_decode_steps

    def snapshot(self) -> TraceSnapshot:
        """What it is now, by reference: a microsecond per thousand events."""
        return TraceSnapshot(
            arrival_s=self.arrival_s,
            noted=tuple(self._events),
            runs=tuple(self._runs),
            num_decode_steps=self.num_decode_steps,
        )

    def events(self) -> list[LifecycleEvent]:
        """All events in order of time."""
        return list(self.snapshot().events())

    def timings(self, now: float, num_output_tokens: int) -> Timings:
        """Durations so far; ``now`` stands in for the end of a request that is still running."""
        arrival, end = self.arrival_s, self.ended_s if self.ended_s is not None else now
        first = self.first_token_s
        return Timings(
            queue_s=None if self.admitted_s is None else self.admitted_s - arrival,
            ttft_s=None if first is None else first - arrival,
            tpot_s=None if first is None or num_output_tokens < 2 else (end - first) / (num_output_tokens - 1),
            total_s=end - arrival,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSnapshot:
    """A trace's events at one moment; any thread may work on it. Runs only grow, and only the last one."""

    arrival_s: float
    noted: tuple[LifecycleEvent, ...]
    runs: tuple[DecodeRun, ...]
    num_decode_steps: int  # then; the last run may have got more

    def events(self) -> Iterator[LifecycleEvent]:
        """All events in order of time."""
        by_time = sorted(self.noted, key=_order)
        return heapq.merge(by_time, islice(self._decodes(), self.num_decode_steps), key=_order)

    def _decodes(self) -> Iterator[LifecycleEvent]:
        steps = ((run.step_ids[i], run.times[i]) for run in self.runs for i in range(len(run)))
        for index, (step_id, t_s) in enumerate(steps):
            facts: dict[str, object] = {"token_index": index}
            yield LifecycleEvent(event="DECODE_STEP", t_s=t_s - self.arrival_s, step_id=step_id, facts=facts)


def _order(event: LifecycleEvent) -> tuple[float, bool]:
    return event.t_s, event.event in _TERMINAL.values()


class Tracer:
    """The step ring and the traces of live and recently ended requests."""

    def __init__(self, metrics: Metrics, *, max_steps: int = 4096, max_ended_events: int = 200_000) -> None:
        self.metrics = metrics
        self._steps: deque[StepRecord] = deque(maxlen=max_steps)
        self._live: dict[str, RequestTrace] = {}
        self._ended: OrderedDict[str, RequestTrace] = OrderedDict()  # oldest first
        self._ended_events = 0
        self._max_ended_events = max_ended_events
        self._run: DecodeRun | None = None  # of the step before, if anybody decoded in it

    # reading

    def steps(self, since: int = -1, limit: int | None = None) -> list[StepRecord]:
        """Records of steps with an id above ``since``, oldest first, the newest ``limit`` of them."""
        newest = takewhile(lambda step: step.step_id > since, reversed(self._steps))
        return list(newest if limit is None else islice(newest, limit))[::-1]

    def request(self, request_id: str) -> RequestTrace | None:
        """The trace of a live or recently ended request."""
        return self._live.get(request_id) or self._ended.get(request_id)

    def requests(self) -> Iterator[RequestTrace]:
        """All traces kept, ended ones first."""
        yield from self._ended.values()
        yield from self._live.values()

    # writing: the engine thread

    def submitted(self, request: Request, now: float) -> None:
        trace = self._live[request.request_id] = RequestTrace(request)
        trace.add("SUBMITTED", request.arrival_s, prompt_tokens=len(request.prompt_token_ids))
        trace.add("QUEUED", now)

    def finished(self, event: TokenEvent, now: float) -> None:
        """Close a request's trace: exactly one terminal event each."""
        trace = self._live.pop(event.request_id, None)
        if trace is None:
            return
        assert event.finish_reason is not None
        trace.ended_s, trace.finish_reason = now, event.finish_reason
        trace.add(_TERMINAL[event.finish_reason], now, reason=event.finish_reason, stop_reason=event.stop_reason)
        if self._run is not None and event.request_id in self._run.request_ids:
            self._run = None  # it takes no part in what follows
        self.metrics.request_ended(event.finish_reason)
        num_tokens, last_s = trace.num_output_tokens, trace.latest_token_s
        if trace.first_token_s is not None and num_tokens > 1:
            self.metrics.answered((last_s - trace.first_token_s) / (num_tokens - 1), last_s)
        self._ended[event.request_id] = trace
        self._ended_events += len(trace)
        while self._ended_events > self._max_ended_events and len(self._ended) > 1:
            _, oldest = self._ended.popitem(last=False)
            self._ended_events -= len(oldest)

    def forget(self, request_ids: Iterable[str]) -> None:
        """After a record could not be written: let go of requests that have ended, and begin a new run."""
        self._run = None
        for request_id in request_ids:
            self._live.pop(request_id, None)

    def step(self, plan: StepPlan, result: StepResult | None, events: list[TokenEvent], now: float) -> None:
        """Record one step and what it meant for each request. ``result`` is None if the step failed."""
        if not plan.chunks and not plan.admitted and not plan.preempted and not events:
            return
        duration_s = result.duration_s if result is not None else 0.0
        started = now - duration_s
        for request_id in plan.preempted:
            if (trace := self._live.get(request_id)) is not None:
                trace.add("PREEMPTED", started, plan.step_id)
        for admission in plan.admitted:
            if (trace := self._live.get(admission.request_id)) is not None:
                if trace.admitted_s is None:
                    trace.admitted_s, trace.cached_tokens = started, admission.cached_tokens
                facts = {"cached_tokens": admission.cached_tokens, "miss_reason": admission.miss_reason}
                trace.add("ADMITTED", started, plan.step_id, **facts, **admission.facts)
        decoding = tuple([chunk.request_id for chunk in plan.chunks if chunk.is_decode])
        self._record_tokens(plan, result, decoding, events, now)
        if len(decoding) == len(plan.chunks):
            chunks, prompt_tokens = StepChunks.of_decodes(decoding, plan.chunks), 0
        else:
            self._record_chunks(plan, now)
            chunks = StepChunks.of(plan.chunks)
            prompt_tokens = sum(len(c.token_ids) for c in plan.chunks if c.reason not in ("decode", "verify"))
        for event in events:
            if event.finish_reason is not None:
                self.finished(event, now)
        self._steps.append(_step_record(plan, result, chunks, now))
        self.metrics.step(
            now=now,
            duration_s=None if result is None else duration_s,
            prompt_tokens=prompt_tokens,
            output_tokens=len([event for event in events if event.token is not None]),
            preemptions=len(plan.preempted),
        )

    def _record_tokens(
        self,
        plan: StepPlan,
        result: StepResult | None,
        decoding: tuple[str, ...],
        events: list[TokenEvent],
        now: float,
    ) -> None:
        """Decode steps and tokens. While the same requests decode and none fails, a step is one entry for all."""
        run = self._run
        if run is not None and run.request_ids == decoding and result is not None and not result.failed:
            self.metrics.next_tokens(now - run.times[-1], now, requests=len(decoding))
            run.add(plan.step_id, now)
            if len(events) > len(decoding):
                known = frozenset(decoding)
                self._note_tokens([event for event in events if event.request_id not in known], now)
            return
        self._note_tokens(events, now)
        self._run = DecodeRun(decoding) if decoding else None
        if self._run is not None:
            self._run.add(plan.step_id, now)
            for request_id in decoding:
                if (trace := self._live.get(request_id)) is not None:
                    trace.add_run(self._run)

    def _note_tokens(self, events: Sequence[TokenEvent], now: float) -> None:
        for event in events:
            trace = self._live.get(event.request_id)
            if trace is None or event.token is None:
                continue
            first, gap = trace.first_token_s is None, trace.add_token(now)
            if first:
                self.metrics.first_token(gap, now)
            else:
                self.metrics.next_tokens(gap, now)

    def _record_chunks(self, plan: StepPlan, now: float) -> None:
        for chunk in plan.chunks:
            if not chunk.is_decode and (trace := self._live.get(chunk.request_id)) is not None:
                name: EventName = "DECODE_STEP" if chunk.reason == "verify" else "PREFILL_CHUNK"
                length = len(chunk.token_ids)
                trace.add(name, now, plan.step_id, start=chunk.start, length=length, reason=chunk.reason)


def _step_record(plan: StepPlan, result: StepResult | None, chunks: StepChunks, now: float) -> StepRecord:
    took = result or _NO_RESULT
    return StepRecord(
        step_id=plan.step_id,
        t_s=now,
        chunks=chunks,
        budget=plan.budget,
        admitted=plan.admitted,
        preempted=plan.preempted,
        waiting_for=dict(islice(plan.waiting_for.items(), WAITING_KEPT)),
        evicted=plan.evicted,
        num_block_copies=len(plan.block_copies),
        num_waiting=plan.num_waiting,
        num_running=plan.num_running,
        free_blocks=plan.free_blocks,
        build_s=took.build_s,
        forward_s=took.forward_s,
        sample_s=took.sample_s,
        failed=result is None,
        gil_wait_s=took.gil_wait_s,
    )
