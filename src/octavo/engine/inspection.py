"""What the engine shows of itself, as plain dicts ready for JSON. Call these on the engine thread: ``inspect(fn)``."""

from __future__ import annotations

import dataclasses
from typing import Any

from octavo.engine.load import LoadedEngine
from octavo.observability.trace import RequestTrace, StepRecord


def stats(engine: LoadedEngine, window_s: float) -> dict[str, Any]:
    """Latencies, throughput, load, KV use and prefix hit rate; latencies in seconds over the last ``window_s``."""
    core, now = engine.core, engine.core.clock()
    metrics, cache = core.tracer.metrics, core.scheduler.manager.stats()
    used = cache.num_blocks - cache.free_blocks - cache.cached_blocks
    return {
        "window_s": window_s,
        **{name: dataclasses.asdict(summary) for name, summary in metrics.latencies(now, window_s).items()},
        "throughput": metrics.throughput(now, window_s),
        "requests": {
            "running": core.scheduler.num_running,
            "waiting": core.scheduler.num_waiting,
            "ended": dict(metrics.requests_ended),
        },
        "steps": metrics.steps,
        "preemptions": metrics.preemptions,
        "kv_cache": {
            "blocks": cache.num_blocks,
            "used_blocks": used,
            "cached_blocks": cache.cached_blocks,
            "free_blocks": cache.free_blocks,
            "utilisation": used / cache.num_blocks,
        },
        "prefix_cache": {
            "lookups": cache.lookups,
            "hits": cache.hits,
            "hit_tokens": cache.hit_tokens,
            "hit_rate": cache.hit_tokens / cache.lookup_tokens if cache.lookup_tokens else None,
        },
    }


def prefix_cache(engine: LoadedEngine) -> dict[str, Any]:
    """The prefix tree in figures. ``hit_rate`` is by tokens: reused over looked up."""
    cache = engine.core.scheduler.manager.stats()
    return {
        "depth": cache.depth,
        "nodes": cache.nodes,
        "cached_blocks": cache.cached_blocks,
        "pinned_blocks": cache.pinned_blocks,
        "lookups": cache.lookups,
        "hits": cache.hits,
        "misses": cache.misses,
        "hit_tokens": cache.hit_tokens,
        "lookup_tokens": cache.lookup_tokens,
        "hit_rate": cache.hit_tokens / cache.lookup_tokens if cache.lookup_tokens else None,
        "evictions": cache.evictions,
    }


def lifecycle(engine: LoadedEngine, request_id: str) -> dict[str, Any] | None:
    """The events of one live or recently ended request and what they add up to; None if it is not known (any more)."""
    trace = engine.core.tracer.request(request_id)
    if trace is None:
        return None
    events = [
        {"event": e.event, "t_s": round(e.t_s, 6), "step_id": e.step_id, "facts": e.facts} for e in trace.events()
    ]
    return {"request_id": request_id, "events": events, "summary": _summary(engine, trace)}


def _summary(engine: LoadedEngine, trace: RequestTrace) -> dict[str, Any]:
    events = trace.events()
    names = [event.event for event in events]
    num_tokens = trace.num_output_tokens
    timings = trace.timings(engine.core.clock(), num_tokens)
    return {
        "prompt_tokens": trace.num_prompt_tokens,
        "cached_tokens": trace.cached_tokens,
        "output_tokens": num_tokens,
        "prefill_chunks": names.count("PREFILL_CHUNK"),
        "decode_steps": names.count("DECODE_STEP"),
        "preemptions": names.count("PREEMPTED"),
        **dataclasses.asdict(timings),
        "ended": names[-1] if trace.ended_s is not None else None,
    }


def steps(engine: LoadedEngine, since: int = -1, limit: int | None = None) -> list[dict[str, Any]]:
    """Step records above id ``since``, oldest first, the newest ``limit`` of them."""
    return [step_dict(record) for record in engine.core.tracer.steps(since, limit)]


def step_dict(record: StepRecord) -> dict[str, Any]:
    """One step record as the debug routes show it."""
    return {
        "step_id": record.step_id,
        "t_s": record.t_s,
        "chunks": [
            {"request_id": c.request_id, "start": c.start, "len": c.length, "reason": c.reason} for c in record.chunks
        ],
        "budget": dataclasses.asdict(record.budget) if record.budget is not None else None,
        "admitted": [dataclasses.asdict(admission) for admission in record.admitted],
        "preempted": list(record.preempted),
        "waiting_for": record.waiting_for,
        "evicted": record.evicted,
        "block_copies": record.num_block_copies,
        "waiting": record.num_waiting,
        "running": record.num_running,
        "free_blocks": record.free_blocks,
        "step_ms": record.step_s * 1e3,
        "build_ms": record.build_s * 1e3,
        "forward_ms": record.forward_s * 1e3,
        "sample_ms": record.sample_s * 1e3,
        "gil_wait_ms": record.gil_wait_s * 1e3,
        "failed": record.failed,
    }
