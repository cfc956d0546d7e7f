"""Facts of what happened: a ring of steps, and the life of each request.

Written by the engine thread only; other threads read it between steps (``AsyncEngine.inspect``).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from octavo.core.output import Timings
from octavo.core.plan import Admission, BudgetFacts, FinishReason, StepPlan, StepResult, TokenEvent
from octavo.core.records import hot_record
from octavo.core.request import Request
from octavo.observability.metrics import Metrics

EventName = Literal[
    "SUBMITTED", "QUEUED", "ADMITTED", "PREFILL_CHUNK", "DECODE_STEP", "PREEMPTED", "FINISHED", "ABORTED", "FAILED"
]
_TERMINAL: dict[str, EventName] = {"stop": "FINISHED", "length": "FINISHED", "abort": "ABORTED", "error": "FAILED"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleEvent:
    """One thing that happened to a request. ``t_s`` counts from its arrival."""

    event: EventName
    t_s: float
    step_id: int | None = None
    facts: dict[str, object] = field(default_factory=dict)


@hot_record
class ChunkRecord:
    """What a step ran for one request: positions [start, start + length)."""

    request_id: str
    start: int
    length: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of the engine, without views: safe to keep."""

    step_id: int
    t_s: float  # end of the step, monotonic clock
    chunks: tuple[ChunkRecord, ...]
    budget: BudgetFacts | None
    admitted: tuple[Admission, ...]
    preempted: tuple[str, ...]
    waiting_for: dict[str, str]
    evicted: int
    num_block_copies: int
    num_waiting: int
    num_running: int
    free_blocks: int
    step_s: float
    build_s: float
    forward_s: float
    sample_s: float
    failed: bool
    gil_wait_s: float = 0.0  # of build_s: see StepResult


class RequestTrace:
    """The life of one request. Decode steps, one per token, are kept as two numbers each."""

    __slots__ = (
        "_decode_step_ids",
        "_decode_times",
        "_events",
        "admitted_s",
        "arrival_s",
        "cached_tokens",
        "client",
        "ended_s",
        "finish_reason",
        "first_token_s",
        "num_output_tokens",
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
        self._decode_times = array("d")
        self._decode_step_ids = array("q")
        self.admitted_s: float | None = None  # first admission, monotonic clock
        self.cached_tokens = 0  # at first admission
        self.num_output_tokens = 0
        self.first_token_s: float | None = None
        self.ended_s: float | None = None
        self.finish_reason: FinishReason | None = None

    def add(self, event: EventName, now: float, step_id: int | None = None, **facts: object) -> None:
        self._events.append(LifecycleEvent(event=event, t_s=now - self.arrival_s, step_id=step_id, facts=facts))

    def correct_end(self, reason: FinishReason, stop_reason: str) -> None:
        """Give the terminal event, which must be there, another reason."""
        end = self._events.pop()
        facts: dict[str, object] = {"reason": reason, "stop_reason": stop_reason}
        self._events.append(replace(end, event=_TERMINAL[reason], facts=facts))
        self.finish_reason = reason

    def add_decode(self, now: float, step_id: int) -> None:
        self._decode_times.append(now - self.arrival_s)
        self._decode_step_ids.append(step_id)

    def __len__(self) -> int:
        return len(self._events) + len(self._decode_times)

    def events(self) -> list[LifecycleEvent]:
        """All events in order of time."""
        decodes = (
            LifecycleEvent(event="DECODE_STEP", t_s=t_s, step_id=step_id, facts={"token_index": index})
            for index, (t_s, step_id) in enumerate(zip(self._decode_times, self._decode_step_ids, strict=True))
        )
        return sorted([*self._events, *decodes], key=lambda event: (event.t_s, event.event in _TERMINAL.values()))

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


class Tracer:
    """The step ring and the traces of live and recently ended requests."""

    def __init__(self, metrics: Metrics, *, max_steps: int = 4096, max_ended_events: int = 200_000) -> None:
        self.metrics = metrics
        self._steps: deque[StepRecord] = deque(maxlen=max_steps)
        self._live: dict[str, RequestTrace] = {}
        self._ended: OrderedDict[str, RequestTrace] = OrderedDict()  # oldest first
        self._ended_events = 0
        self._max_ended_events = max_ended_events
        self._last_step_end = 0.0

    # reading

    def steps(self, since: int = -1, limit: int | None = None) -> list[StepRecord]:
        """Records of steps with an id above ``since``, oldest first, the newest ``limit`` of them."""
        found = [step for step in self._steps if step.step_id > since]
        return found if limit is None else found[-limit:] if limit else []

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
        self.metrics.request_ended(event.request_id, event.finish_reason)
        self._ended[event.request_id] = trace
        self._ended_events += len(trace)
        while self._ended_events > self._max_ended_events and len(self._ended) > 1:
            _, oldest = self._ended.popitem(last=False)
            self._ended_events -= len(oldest)

    def corrected(self, request_id: str, reason: FinishReason, stop_reason: str) -> None:
        """A request that has just ended ended in another way: its last token also completed a stop string."""
        trace = self._ended.get(request_id)
        if trace is None or trace.finish_reason is None:
            return
        self.metrics.requests_ended[trace.finish_reason] -= 1
        self.metrics.requests_ended[reason] += 1
        trace.correct_end(reason, stop_reason)

    def step(self, plan: StepPlan, result: StepResult | None, events: list[TokenEvent], now: float) -> None:
        """Record one step and what it meant for each request. ``result`` is None if the step failed."""
        if not plan.chunks and not plan.admitted and not plan.preempted and not events:
            return
        started = now - (result.duration_s if result is not None else 0.0)
        for request_id in plan.preempted:
            if (trace := self._live.get(request_id)) is not None:
                trace.add("PREEMPTED", started, plan.step_id)
        for admission in plan.admitted:
            if (trace := self._live.get(admission.request_id)) is not None:
                if trace.admitted_s is None:
                    trace.admitted_s, trace.cached_tokens = started, admission.cached_tokens
                facts = {"cached_tokens": admission.cached_tokens, "miss_reason": admission.miss_reason}
                trace.add("ADMITTED", started, plan.step_id, **facts, **admission.facts)
        self._record_chunks(plan, now)
        for event in events:
            self._record_event(event, now)
        self._steps.append(_step_record(plan, result, now))
        self.metrics.step(plan, result, now)

    def _record_chunks(self, plan: StepPlan, now: float) -> None:
        for chunk in plan.chunks:
            trace = self._live.get(chunk.request_id)
            if trace is None:
                continue
            if chunk.reason == "decode":
                trace.add_decode(now, plan.step_id)
            else:
                trace.add(
                    "PREFILL_CHUNK", now, plan.step_id, start=chunk.start, length=len(chunk.token_ids),
                    reason=chunk.reason,
                )  # fmt: skip

    def _record_event(self, event: TokenEvent, now: float) -> None:
        trace = self._live.get(event.request_id)
        if trace is None:
            return
        if event.token is not None:
            trace.num_output_tokens += 1
            if trace.first_token_s is None:
                trace.first_token_s = now
                self.metrics.first_token(event.request_id, now - trace.arrival_s, now)
            else:
                self.metrics.next_token(event.request_id, now)
        if event.finish_reason is not None:
            self.finished(event, now)


def _step_record(plan: StepPlan, result: StepResult | None, now: float) -> StepRecord:
    return StepRecord(
        step_id=plan.step_id,
        t_s=now,
        chunks=tuple(
            ChunkRecord(request_id=c.request_id, start=c.start, length=len(c.token_ids), reason=c.reason)
            for c in plan.chunks
        ),
        budget=plan.budget,
        admitted=plan.admitted,
        preempted=plan.preempted,
        waiting_for=dict(plan.waiting_for),
        evicted=plan.evicted,
        num_block_copies=len(plan.block_copies),
        num_waiting=plan.num_waiting,
        num_running=plan.num_running,
        free_blocks=plan.free_blocks,
        step_s=result.duration_s if result is not None else 0.0,
        build_s=result.build_s if result is not None else 0.0,
        forward_s=result.forward_s if result is not None else 0.0,
        sample_s=result.sample_s if result is not None else 0.0,
        failed=result is None,
        gil_wait_s=result.gil_wait_s if result is not None else 0.0,
    )
