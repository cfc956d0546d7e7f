"""What the engine shows of itself: taken on its thread, between two steps (``inspect(take_...)``), in microseconds."""

from __future__ import annotations

from octavo.engine.engine import Engine
from octavo.observability.snapshots import LifecycleSnapshot, StatsSnapshot


def take_stats(engine: Engine) -> StatsSnapshot:
    """On the engine thread."""
    return StatsSnapshot(
        metrics=engine.tracer.metrics.snapshot(engine.clock()),
        cache=engine.scheduler.manager.stats(),
        num_running=engine.scheduler.num_running,
        num_waiting=engine.scheduler.num_waiting,
    )


def take_lifecycle(engine: Engine, request_id: str) -> LifecycleSnapshot | None:
    """On the engine thread; None if the request is not known (any more)."""
    trace = engine.tracer.request(request_id)
    return None if trace is None else LifecycleSnapshot.of(trace, engine.clock())
