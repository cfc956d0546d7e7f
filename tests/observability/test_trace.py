from __future__ import annotations

import gc
import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.plan import Admission, SampledToken, ScheduledChunk, StepPlan, StepResult, TokenEvent
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.observability.metrics import Metrics, Summary, TimedRing
from octavo.observability.trace import DecodeRun, RequestTrace, Tracer


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
        chunks=(ScheduledChunk(request_id="a", start=start, token_ids=[0] * length, block_tables=(), reason=reason),),
        admitted=(Admission(request_id="a", cached_tokens=1, miss_reason="never seen"),) if step_id == 0 else (),
    )
    token = SampledToken(token_id=9)
    result = StepResult(step_id=step_id, tokens=((token,),), forward_s=0.5)
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
    latencies = tracer.metrics.snapshot(13.0).latencies(60.0)
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


@pytest.mark.parametrize("way", ["by the step", "from outside", "in a step that failed", "by an error alone"])
def test_ended_traces_are_let_go_of_with_the_runs_they_shared(way: str) -> None:
    """Each leaves 53 events, 50 of them decode steps, and 200 are kept: three requests and what is over."""
    tracer, step_id = Tracer(Metrics(), max_ended_events=200), 0
    for index in range(20):
        name = f"{way} {index}"
        tracer.submitted(request(name), 0.0)
        for remaining in range(49, -1, -1):
            chunk = ScheduledChunk(request_id=name, start=step_id, token_ids=[0], block_tables=())
            last = remaining == 0 and way != "from outside"
            finish = None if not last else "length" if way == "by the step" else "error"
            token = SampledToken(token_id=1) if finish != "error" else None
            event = TokenEvent(request_id=name, token=token, finish_reason=finish)  # type: ignore[arg-type]
            result = StepResult(
                step_id=step_id, tokens=((token,),), failed={0: "not_finite"} if finish == "error" else {}
            )
            crashed = last and way == "in a step that failed"
            tracer.step(StepPlan(step_id=step_id, chunks=(chunk,)), None if crashed else result, [event], step_id + 1.0)
            step_id += 1
        if way == "from outside":
            tracer.finished(TokenEvent(request_id=name, finish_reason="abort"), step_id + 1.0)
        kept = list(tracer.requests())
        assert sum(len(trace) for trace in kept) <= 200
        assert all(trace.ended_s is not None for trace in kept), "nobody is live"
        del kept
    gc.collect()
    living = gc.get_objects()  # type() and not isinstance, which asks proxies of other packages what they are
    traces = {trace.request_id for trace in living if type(trace) is RequestTrace}
    runs = {name for run in living if type(run) is DecodeRun for name in run.request_ids}
    newest = {f"{way} {index}" for index in (17, 18, 19)}
    assert {name for name in traces if name.startswith(way)} == newest
    assert {name for name in runs if name.startswith(way)} == newest


def test_the_default_bound_on_ended_traces_holds() -> None:
    tracer = Tracer(Metrics())
    for index in range(10):
        tracer.submitted(request(f"r{index}"), 0.0)
        trace = tracer.request(f"r{index}")
        assert trace is not None
        trace._num_run_steps = 50_000  # as if it had decoded so often
        tracer.finished(TokenEvent(request_id=f"r{index}", finish_reason="abort"), 1.0)
    assert [trace.request_id for trace in tracer.requests()] == ["r7", "r8", "r9"]


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

    def steps(start_s: int, end_s: int, per_s: int) -> None:
        for index in range((end_s - start_s) * per_s):
            now = start_s + (index + 1) / per_s
            metrics.step(now=now, duration_s=0.5 / per_s, prompt_tokens=3, output_tokens=1, preemptions=0)

    steps(100, 110, 2)
    young = metrics.snapshot(110.0).throughput(300.0)
    assert young["output_tokens_per_s"] == pytest.approx(2.0, rel=0.1), "not divided by time before the first step"
    assert young["prompt_tokens_per_s"] == pytest.approx(6.0, rel=0.1)
    steps(110, 410, 300)  # more steps than any ring of steps would hold
    assert metrics.snapshot(410.0).throughput(300.0)["output_tokens_per_s"] == pytest.approx(300.0, rel=0.02)
    assert metrics.snapshot(1010.0).throughput(600.0)["output_tokens_per_s"] == pytest.approx(0.0, abs=1.0), "long over"
    assert Metrics().snapshot(5.0).throughput(60.0) == {"prompt_tokens_per_s": 0.0, "output_tokens_per_s": 0.0}


def pairs(ring: TimedRing, start: float) -> list[tuple[float, int]]:
    entries = ring.snapshot().since(start)
    return list(zip(entries["value"].tolist(), entries["repeats"].tolist(), strict=True))


def summary(values: list[tuple[float, int]]) -> Summary:
    return Summary.of(np.array([v for v, _ in values]), np.array([r for _, r in values], np.int64))


def test_a_ring_gives_the_newest_values_of_a_window() -> None:
    ring = TimedRing(4)
    for value in range(10):
        ring.add(float(value), value * 2.0)
    assert pairs(ring, 0.0) == [(12.0, 1), (14.0, 1), (16.0, 1), (18.0, 1)]
    assert pairs(ring, 8.0) == [(16.0, 1), (18.0, 1)]


def test_a_snapshot_of_a_ring_stays_what_it_was_while_pages_come_and_go() -> None:
    ring = TimedRing(10_000)
    for value in range(25_000):
        if value == 14_321:
            before = ring.snapshot()
        ring.add(float(value), float(value), value)
    taken = before.since(0.0)
    assert taken["value"].tolist() == list(range(4_321, 14_321)), "the newest 10,000 of then"
    assert taken["repeats"].tolist() == list(range(4_321, 14_321))
    assert [value for value, _ in pairs(ring, 0.0)] == list(range(15_000, 25_000))


def test_percentiles_are_by_nearest_rank() -> None:
    found = summary([(float(v), 1) for v in range(100)])
    assert (found.count, found.mean, found.p50, found.p99) == (100, 49.5, 50.0, 99.0)
    assert summary([]).p99 is None


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.integers(1, 5)), min_size=1))
def test_a_value_seen_several_times_weighs_as_much_as_that_many_values(values: list[tuple[float, int]]) -> None:
    one_by_one = [(value, 1) for value, repeats in values for _ in range(repeats)]
    joined, apart = summary(values), summary(one_by_one)
    assert (joined.count, joined.p50, joined.p99) == (apart.count, apart.p50, apart.p99)
    assert joined.mean == pytest.approx(apart.mean)


def test_runs_shared_by_batch_mates_tell_of_each_request_what_notes_of_its_own_would() -> None:
    """Random schedules: requests decode, prefill, pause, fail and end, alone or with a whole step."""
    rng = random.Random(5)
    for _ in range(150):
        tracer, names = Tracer(Metrics()), [f"r{i}" for i in range(rng.randint(1, 4))]
        decodes: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
        token_times: dict[str, list[float]] = {name: [] for name in names}
        for name in names:
            tracer.submitted(request(name), 0.0)
        running = list(names)
        for step_id in range(rng.randint(1, 25)):
            now, crashed = float(step_id + 1), rng.random() < 0.03
            chunks, events, failed = [], [], []
            for name in running:
                if rng.random() < 0.1:
                    continue
                reason = rng.choice(["decode"] * 8 + ["last piece", "budget"])
                chunks.append(ScheduledChunk(request_id=name, start=0, token_ids=[0], block_tables=(), reason=reason))
                if reason == "decode":
                    decodes[name].append((step_id, now))
                fails = crashed or rng.random() < 0.03
                if fails:
                    failed.append(len(chunks) - 1)
                elif reason != "budget":
                    token_times[name].append(now)
                token = None if fails or reason == "budget" else SampledToken(token_id=1)
                finish = "error" if fails else "length" if token and rng.random() < 0.05 else None
                if token or finish:
                    events.append(TokenEvent(request_id=name, token=token, finish_reason=finish))  # type: ignore[arg-type]
            plan = StepPlan(step_id=step_id, chunks=tuple(chunks))
            result = StepResult(step_id=step_id, tokens=((),) * len(chunks), failed=dict.fromkeys(failed, "not_finite"))
            tracer.step(plan, None if crashed else result, events, now)
            running = [name for name in running if not any(e.request_id == name and e.finish_reason for e in events)]
        gaps = sorted(b - a for times in token_times.values() for a, b in itertools.pairwise(times))
        assert sorted(gap for gap, repeats in pairs(tracer.metrics._itl, 0.0) for _ in range(repeats)) == gaps
        for name in names:
            trace = tracer.request(name)
            assert trace is not None
            steps = [(e.step_id, e.t_s) for e in trace.events() if e.event == "DECODE_STEP"]
            assert steps == decodes[name]
            assert trace.num_output_tokens == len(token_times[name])
            assert trace.first_token_s == min(token_times[name], default=None)
            assert trace.latest_token_s == max(token_times[name], default=0.0)
