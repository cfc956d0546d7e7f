from __future__ import annotations

import gc

import pytest

from octavo.core.plan import Admission, SampledToken, ScheduledChunk, StepPlan, StepResult, TokenEvent
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.observability.metrics import Metrics, Summary, TimedRing
from octavo.observability.trace import Tracer


def request(request_id: str, arrival_s: float = 0.0) -> Request:
    return Request(
        request_id=request_id, prompt_token_ids=(1, 2, 3), sampling=SamplingParams(), max_tokens=5,
        stop_token_ids=frozenset(), seed=0, arrival_s=arrival_s,
    )  # fmt: skip


def step(
    tracer: Tracer, step_id: int, start: int, length: int, reason: str, now: float, *, finish: str | None = None
) -> None:
    plan = StepPlan(
        step_id=step_id,
        chunks=(ScheduledChunk(request_id="a", start=start, token_ids=[0] * length, block_ids=(), reason=reason),),
        admitted=(Admission(request_id="a", cached_tokens=1, miss_reason="never seen"),) if step_id == 0 else (),
    )
    token = SampledToken(token_id=9)
    result = StepResult(step_id=step_id, tokens=(token,), forward_s=0.5)
    tracer.step(plan, result, [TokenEvent(request_id="a", token=token, finish_reason=finish)], now)  # type: ignore[arg-type]


def test_a_request_leaves_its_whole_life_in_order_and_ends_once() -> None:
    tracer = Tracer(Metrics())
    tracer.submitted(request("a", arrival_s=10.0), 10.25)
    step(tracer, 0, 1, 2, "last piece", 11.0)
    step(tracer, 1, 3, 1, "decode", 12.0)
    step(tracer, 2, 4, 1, "decode", 13.0, finish="length")
    tracer.finished(TokenEvent(request_id="a", finish_reason="abort"), 14.0)
    trace = tracer.request("a")
    assert trace is not None
    assert [(e.event, e.t_s) for e in trace.events()] == [
        ("SUBMITTED", 0.0), ("QUEUED", 0.25), ("ADMITTED", 0.5), ("PREFILL_CHUNK", 1.0), ("DECODE_STEP", 2.0),
        ("DECODE_STEP", 3.0), ("FINISHED", 3.0),
    ]  # fmt: skip
    timings = trace.timings(99.0, 3)
    assert (timings.queue_s, timings.ttft_s, timings.tpot_s, timings.total_s) == (0.5, 1.0, 1.0, 3.0)
    assert trace.cached_tokens == 1
    assert tracer.metrics.requests_ended == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    latencies = tracer.metrics.latencies(13.0, 60.0)
    assert (latencies["ttft_s"].mean, latencies["itl_s"].count, latencies["tpot_s"].p50) == (1.0, 2, 1.0)


def test_old_requests_and_steps_are_forgotten_within_bounds() -> None:
    tracer = Tracer(Metrics(), max_steps=3, max_ended_events=10)
    for index in range(20):
        tracer.submitted(request(f"r{index}"), 0.0)
        tracer.finished(TokenEvent(request_id=f"r{index}", finish_reason="abort"), 1.0)
    assert tracer.request("r0") is None
    assert tracer.request("r19") is not None
    assert sum(len(trace) for trace in tracer.requests()) <= 10
    tracer.submitted(request("a"), 0.0)
    for index in range(5):
        step(tracer, index, index, 1, "decode", float(index))
    assert [s.step_id for s in tracer.steps()] == [2, 3, 4]
    assert [s.step_id for s in tracer.steps(since=2, limit=1)] == [4]


def test_an_ended_request_keeps_its_facts_but_not_its_prompt() -> None:
    tracer = Tracer(Metrics())
    asked = request("a", arrival_s=1.0)
    tracer.submitted(asked, 1.0)
    tracer.finished(TokenEvent(request_id="a", finish_reason="abort"), 2.0)
    trace = tracer.request("a")
    assert trace is not None
    assert (trace.request_id, trace.client, trace.num_prompt_tokens) == ("a", "", 3)
    assert asked.prompt_token_ids not in gc.get_referents(trace)
    assert asked not in gc.get_referents(trace)


def test_throughput_counts_every_step_of_its_window_over_the_time_that_was_watched() -> None:
    metrics = Metrics()
    chunk = ScheduledChunk(request_id="a", start=0, token_ids=[0] * 3, block_ids=(), reason="budget")

    def steps(start_s: int, end_s: int, per_s: int) -> None:
        for index in range((end_s - start_s) * per_s):
            plan = StepPlan(step_id=index, chunks=(chunk,))
            result = StepResult(step_id=index, tokens=(SampledToken(token_id=1),), forward_s=0.5 / per_s)
            metrics.step(plan, result, start_s + (index + 1) / per_s)

    steps(100, 110, 2)
    young = metrics.throughput(110.0, 300.0)
    assert young["output_tokens_per_s"] == pytest.approx(2.0, rel=0.1), "not divided by time before the first step"
    assert young["prompt_tokens_per_s"] == pytest.approx(6.0, rel=0.1)
    steps(110, 410, 300)  # more steps than any ring of steps would hold
    assert metrics.throughput(410.0, 300.0)["output_tokens_per_s"] == pytest.approx(300.0, rel=0.02)
    assert metrics.throughput(1010.0, 600.0)["output_tokens_per_s"] == pytest.approx(0.0, abs=1.0), "long over"
    assert Metrics().throughput(5.0, 60.0) == {"prompt_tokens_per_s": 0.0, "output_tokens_per_s": 0.0}


def test_a_ring_gives_the_newest_values_of_a_window() -> None:
    ring = TimedRing(4)
    for value in range(10):
        ring.add(float(value), value * 2.0)
    assert ring.since(0.0) == [18.0, 16.0, 14.0, 12.0]
    assert ring.since(8.0) == [18.0, 16.0]


def test_percentiles_are_by_nearest_rank() -> None:
    summary = Summary.of([float(v) for v in range(100)])
    assert (summary.count, summary.mean, summary.p50, summary.p99) == (100, 49.5, 50.0, 99.0)
    assert Summary.of([]).p99 is None
