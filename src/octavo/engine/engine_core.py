"""The engine: plan, execute, apply, trace."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from functools import partial

from octavo.core.errors import InvalidRequest
from octavo.core.output import Timings
from octavo.core.plan import FinishReason, StepPlan, StepResult, TokenEvent
from octavo.core.request import Request
from octavo.engine.model_runner import Runner
from octavo.observability.trace import Tracer
from octavo.scheduler.scheduler import Scheduler

CHECK_INTERVAL_S = 60.0

logger = logging.getLogger(__name__)


class EngineCore:
    """Scheduler, runner and tracer, joined. One thread calls it; nothing in here waits.

    What raises in here ends the requests that it concerns, not the engine. A runner that raises has committed nothing,
    so its step fails. A scheduler that raises may have left its books in disorder, so it begins again with empty ones
    and computes the others anew (``Scheduler.restart``). A tracer that raises costs a record.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, tracer: Tracer, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.scheduler = scheduler
        self.tracer = tracer
        self.clock = clock
        self._runner = runner
        self._checked_s = clock()
        self._restarted = False  # in the step before

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def add(self, request: Request) -> None:
        """Queue a request, which must fit the model and the vocabulary (``engine/requests.py``), or raise."""
        self._record((), lambda: self.tracer.submitted(request, self.clock()))
        try:
            self.scheduler.add(request)
        except BaseException as error:
            self.tracer.forget([request.request_id])
            if not isinstance(error, InvalidRequest):  # refused before anything was changed
                self.scheduler.restart([request.request_id])
            raise

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> TokenEvent | None:
        """End a request between two steps (abort, stop string). None if it is unknown or has ended."""
        try:
            event = self.scheduler.finish(request_id, reason, stop_reason)
        except Exception:
            logger.exception("request %s could not be ended; the scheduler begins again without it", request_id)
            self.scheduler.restart([request_id])
            event = TokenEvent(request_id=request_id, finish_reason=reason, stop_reason=stop_reason)
        if event is not None:
            self._record([request_id], lambda: self.tracer.finished(event, self.clock()))
        return event

    def end_by_text(self, request_id: str, reason: FinishReason, stop: str) -> None:
        """End a request whose text has ended, or correct how it ended: its last token may have reached two ends."""
        if self.finish(request_id, reason, stop) is None:
            self._record((), lambda: self.tracer.corrected(request_id, reason, stop))

    def end_all(self) -> None:
        """Forget every request, with empty books afterwards."""
        self.tracer.forget(self.scheduler.restart())

    def step(self) -> list[TokenEvent]:
        """One pass of the engine."""
        plan: StepPlan | None = None
        try:
            plan = self.scheduler.plan(self.clock())
            outcome = self._execute(plan)
            if isinstance(outcome, StepResult):
                events = self.scheduler.apply(plan, outcome)
            else:
                events = self.scheduler.fail_step(plan, _why(outcome))
            self._restarted = False
        except BaseException as error:  # noqa: BLE001 - raised below, if it is not an Exception
            outcome, events = error, self._restart(plan, error)
        if plan is not None:
            result = outcome if isinstance(outcome, StepResult) else None
            ended = [event.request_id for event in events if event.finish_reason is not None]
            self._record(ended, lambda: self.tracer.step(plan, result, events, self.clock()))
        if not isinstance(outcome, StepResult | Exception):  # Ctrl-C: the books are closed, the caller can end the rest
            raise outcome
        return events

    def idle(self) -> None:
        """Called when there is nothing to run: the moment to look for our own bookkeeping bugs.

        At most once a minute: on a large pool it takes a tenth of a second, and a request may arrive meanwhile.
        """
        now = self.clock()
        if now - self._checked_s < CHECK_INTERVAL_S:
            return
        self._checked_s = now
        try:
            self.scheduler.manager.check_integrity()
        except Exception:
            logger.exception("the books of the KV cache are wrong, which is a bug; it begins again, empty")
            self.scheduler.restart(())

    def facts(self, request_id: str, num_output_tokens: int) -> tuple[int, Timings | None]:
        """(prompt tokens whose KV was not computed, timings) of a request that is ending or has just ended."""
        trace = self.tracer.request(request_id)
        if trace is None:
            return 0, None
        return trace.cached_tokens, trace.timings(self.clock(), num_output_tokens)

    def _execute(self, plan: StepPlan) -> StepResult | BaseException:
        """What came of the plan; an error if the runner raised, and then nothing was committed."""
        try:
            return self._runner.execute(plan)
        except BaseException as error:
            if isinstance(error, Exception):
                logger.exception("step %d failed; its %d requests fail with it", plan.step_id, len(plan.chunks))
            return error

    def _restart(self, plan: StepPlan | None, error: BaseException) -> list[TokenEvent]:
        """The scheduler raised: what came of the plan is lost, and its requests end. Everybody's do the second time."""
        logger.error("the scheduler raised; it begins again, without the requests of this step", exc_info=error)
        lost: list[str] = []
        if plan is not None:
            lost = [chunk.request_id for chunk in plan.chunks] + [request_id for request_id, _ in plan.failed]
        if self._restarted:
            lost = [*{*lost, *self.scheduler.restart()}]
        else:
            self.scheduler.restart(lost)
        self._restarted = True
        events = [TokenEvent(request_id=name, finish_reason="error", stop_reason=_why(error)) for name in lost]
        for event in events if plan is None else ():
            self._record([event.request_id], partial(self.tracer.finished, event, self.clock()))
        return events

    def _record(self, ended: Collection[str], write: Callable[[], None]) -> None:
        """Write a record. If that raises, nobody's answer suffers; ``ended`` requests are let go of."""
        try:
            write()
        except Exception:
            logger.exception("a record of the trace could not be written")
            self.tracer.forget(ended)


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
