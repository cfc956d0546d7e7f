"""What the engine shows of itself, as data: references to what does not change any more, taken between two steps.

``as_dict`` and ``..._dict`` make plain dicts of it, ready for JSON, on whatever thread has time.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from octavo.core.output import Timings
from octavo.memory.cache_stats import CacheStats
from octavo.observability.metrics import MetricsSnapshot
from octavo.observability.trace import RequestTrace, StepRecord, TraceSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsSnapshot:
    """Latencies, throughput, load, KV use and prefix hit rate at one moment."""

    metrics: MetricsSnapshot
    cache: CacheStats
    num_running: int
    num_waiting: int

    def as_dict(self, window_s: float) -> dict[str, Any]:
        """Latencies in seconds, of the last ``window_s``."""
        metrics, cache = self.metrics, self.cache
        used = cache.num_blocks - cache.free_blocks - cache.cached_blocks
        return {
            "window_s": window_s,
            **{name: dataclasses.asdict(summary) for name, summary in metrics.latencies(window_s).items()},
            "throughput": metrics.throughput(window_s),
            "requests": {
                "running": self.num_running,
                "waiting": self.num_waiting,
                "ended": metrics.requests_ended,
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


def prefix_cache_dict(cache: CacheStats) -> dict[str, Any]:
    """The prefix tree in figures. ``hit_rate`` is by tokens: reused over looked up."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleSnapshot:
    """One live or recently ended request at one moment."""

    request_id: str
    client: str
    trace: TraceSnapshot
    num_prompt_tokens: int
    cached_tokens: int
    num_output_tokens: int
    timings: Timings
    has_ended: bool

    @classmethod
    def of(cls, trace: RequestTrace, now: float) -> LifecycleSnapshot:
        num_tokens = trace.num_output_tokens
        return cls(
            request_id=trace.request_id,
            client=trace.client,
            trace=trace.snapshot(),
            num_prompt_tokens=trace.num_prompt_tokens,
            cached_tokens=trace.cached_tokens,
            num_output_tokens=num_tokens,
            timings=trace.timings(now, num_tokens),
            has_ended=trace.ended_s is not None,
        )

    def as_dict(self) -> dict[str, Any]:
        """Its events and what they add up to."""
        events = [
            {"event": e.event, "t_s": round(e.t_s, 6), "step_id": e.step_id, "facts": e.facts}
            for e in self.trace.events()
        ]
        names = [event["event"] for event in events]
        summary = {
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.num_output_tokens,
            "prefill_chunks": names.count("PREFILL_CHUNK"),
            "decode_steps": names.count("DECODE_STEP"),
            "preemptions": names.count("PREEMPTED"),
            **dataclasses.asdict(self.timings),
            "ended": names[-1] if self.has_ended else None,
        }
        return {"request_id": self.request_id, "events": events, "summary": summary}


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
