"""The engine: plan, execute, apply, trace."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from octavo.core.output import Timings
from octavo.core.plan import FinishReason, StepPlan, StepResult, TokenEvent
from octavo.core.request import Request
from octavo.engine.model_runner import Runner
from octavo.observability.trace import Tracer
from octavo.scheduler.scheduler import Scheduler

CHECK_INTERVAL_S = 60.0

logger = logging.getLogger(__name__)


class EngineCore:
    """Scheduler, runner and tracer, joined. One thread calls it; nothing in here waits."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, tracer: Tracer, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.scheduler = scheduler
        self.tracer = tracer
        self.clock = clock
        self._runner = runner
        self._checked_s = clock()

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def add(self, request: Request) -> None:
        """Queue a request. It must fit the model and the vocabulary (``engine/requests.py`` checks)."""
        self.tracer.submitted(request, self.clock())
        self.scheduler.add(request)

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> TokenEvent | None:
        """End a request between two steps (abort, stop string). None if it is unknown or has ended."""
        event = self.scheduler.finish(request_id, reason, stop_reason)
        if event is not None:
            self.tracer.finished(event, self.clock())
        return event

    def end_by_text(self, request_id: str, reason: FinishReason, stop: str) -> None:
        """End a request whose text has ended, or correct how it ended: its last token may have reached two ends."""
        if self.finish(request_id, reason, stop) is None:
            self.tracer.corrected(request_id, reason, stop)

    def step(self) -> list[TokenEvent]:
        """One pass of the engine."""
        plan = self.scheduler.plan(self.clock())
        result, events = self._run(plan)
        self.tracer.step(plan, result, events, self.clock())
        return events

    def idle(self) -> None:
        """Called when there is nothing to run: the moment to look for our own bookkeeping bugs.

        At most once a minute: on a large pool it takes a tenth of a second, and a request may arrive meanwhile.
        """
        now = self.clock()
        if now - self._checked_s >= CHECK_INTERVAL_S:
            self._checked_s = now
            self.scheduler.manager.check_integrity()

    def facts(self, request_id: str, num_output_tokens: int) -> tuple[int, Timings | None]:
        """(prompt tokens whose KV was not computed, timings) of a request that is ending or has just ended."""
        trace = self.tracer.request(request_id)
        if trace is None:
            return 0, None
        return trace.cached_tokens, trace.timings(self.clock(), num_output_tokens)

    def _run(self, plan: StepPlan) -> tuple[StepResult | None, list[TokenEvent]]:
        """Execute and apply. A step that raises fails the requests in it, commits nothing, and touches nobody else."""
        try:
            result = self._runner.execute(plan)
        except BaseException as error:
            events = self.scheduler.fail_step(plan, f"{type(error).__name__}: {error}")
            if not isinstance(error, Exception):  # Ctrl-C: the books are closed, so that the caller can end the rest
                self.tracer.step(plan, None, events, self.clock())
                raise
            logger.exception("step %d failed; its %d requests fail with it", plan.step_id, len(plan.chunks))
            return None, events
        return result, self.scheduler.apply(plan, result)
