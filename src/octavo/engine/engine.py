"""The engine: plan, execute, apply, text, trace."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from octavo.core.config import ResolvedConfig
from octavo.core.errors import InvalidRequest
from octavo.core.output import RequestOutput, Usage
from octavo.core.plan import FinishReason, StepPlan, StepResult, TokenEvent
from octavo.core.request import Request
from octavo.engine.model_runner import ModelRunner
from octavo.engine.output_processor import Ending, OutputProcessor
from octavo.observability.trace import RequestTrace, Tracer
from octavo.scheduler.scheduler import Scheduler
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer

CHECK_INTERVAL_S = 60.0

logger = logging.getLogger(__name__)


class Engine:
    """Everything that serves one model. One thread calls it; nothing in here waits.

    What raises in here ends the requests that it concerns, not the engine. A runner that raises has committed nothing,
    so its step fails. A scheduler that raises may have left its books in disorder, so it begins again with empty ones
    and computes the others anew (``Scheduler.restart``). Text that cannot be made ends its request. A tracer that
    raises costs a record.
    """

    def __init__(
        self,
        *,
        config: ResolvedConfig,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        scheduler: Scheduler,
        runner: ModelRunner,
        tracer: Tracer,
        load_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """chat_template: None where there is none, or none that compiles; config.chat_template says which."""
        self.config = config
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.scheduler = scheduler
        self.runner = runner
        self.tracer = tracer
        self.processor = OutputProcessor(tokenizer)
        self.load_s = load_s
        self.clock = clock
        self._checked_s = clock()
        self._restarted = False  # in the step before

    def require_chat_template(self) -> ChatTemplate:
        """The chat template. Raises InvalidRequest with the reason if a chat cannot be rendered."""
        if self.chat_template is None:
            raise InvalidRequest(
                f"{self.config.model_name} cannot chat: its chat template is {self.config.chat_template}; "
                "complete texts (/v1/completions, generate()), or give one with --chat-template",
                param="messages",
            )
        return self.chat_template

    # requests, between steps

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue the sequences of one call, which must fit the model (``engine/requests.py``), or raise."""
        queued: list[Request] = []
        try:
            for request in requests:
                self.processor.add(request)
                self.runner.matchers.open(request, self.tokenizer, self.config.vocab_size)
                self._queue(request)
                queued.append(request)
        except BaseException:
            for request in requests[: len(queued) + 1]:
                self.processor.discard(request.request_id)
                self.runner.matchers.close([request.request_id])
            for request in queued:
                self.finish(request.request_id, "error")
            raise

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a sequence that is not wanted any more; its blocks come back at once. [] if it has ended already."""
        trace = self.tracer.request(request_id)
        event = self.finish(request_id, "abort")
        try:
            outputs = self.processor.process([event])[0] if event is not None else []
            return self._completed(outputs, {request_id: trace})
        except Exception:
            logger.exception("the last text of request %s could not be made", request_id)
            return []
        finally:
            self.processor.discard(request_id)  # after an interrupted step it may have ended without an output

    def finish(self, request_id: str, reason: FinishReason) -> TokenEvent | None:
        """End a request between two steps, without a last output. None if it is unknown or has ended."""
        event = self._end(request_id, reason)
        if event is not None:
            self._record([request_id], partial(self._trace_end, event))
        return event

    def end_all(self) -> None:
        """Forget every request, after an error that could not be laid to some of them: empty books afterwards."""
        lost = self.scheduler.restart()
        self.tracer.forget(lost)
        self.runner.matchers.close(lost)
        self.processor.clear()

    # the step

    def step(self) -> list[RequestOutput]:
        """One pass: plan, execute, apply, text, trace -> what is new of each request."""
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
        outputs, events = self._text(events)
        ended = [event.request_id for event in events if event.finish_reason is not None]
        traces = {name: self.tracer.request(name) for name in ended}
        self._trace(plan, outcome if isinstance(outcome, StepResult) else None, events, ended)
        if ended:
            self.runner.matchers.close(ended)
        if not isinstance(outcome, StepResult | Exception):  # Ctrl-C: the books are closed, the caller can end the rest
            raise outcome
        return self._completed(outputs, traces) if ended else outputs

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

    def close(self) -> None:
        """Release threads and memory; nothing may run afterwards."""
        self.runner.close()

    # parts of these

    def _queue(self, request: Request) -> None:
        self._record((), lambda: self.tracer.submitted(request, self.clock()))
        try:
            self.scheduler.add(request)
        except BaseException as error:
            self.tracer.forget([request.request_id])
            if not isinstance(error, InvalidRequest):  # refused before anything was changed
                self.scheduler.restart([request.request_id])
            raise

    def _end(self, request_id: str, reason: FinishReason, stop_reason: str | None = None) -> TokenEvent | None:
        """Take a request out of the scheduler. None if it is not in there."""
        self.runner.matchers.close([request_id])
        try:
            return self.scheduler.finish(request_id, reason, stop_reason)
        except Exception:
            logger.exception("request %s could not be ended; the scheduler begins again without it", request_id)
            self.scheduler.restart([request_id])
            return TokenEvent(request_id=request_id, finish_reason=reason, stop_reason=stop_reason)

    def _execute(self, plan: StepPlan) -> StepResult | BaseException:
        """What came of the plan; an error if the runner raised, and then nothing was committed."""
        try:
            return self.runner.execute(plan)
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
        return [TokenEvent(request_id=name, finish_reason="error", stop_reason=_why(error)) for name in lost]

    def _text(self, events: list[TokenEvent]) -> tuple[list[RequestOutput], list[TokenEvent]]:
        """Outputs of ``events``, and these as they are to be recorded: a request whose text has ended ended with that.

        Its last token may have ended it otherwise too (its length is reached); what the text says counts.
        """
        try:
            outputs, endings = self.processor.process(events)
        except Exception as error:
            logger.exception("the text of a step could not be made; its requests end with it")
            outputs, endings = self.processor.fail(events, _why(error))
        if not endings:
            return outputs, events
        for ending in endings:
            self._end(ending.event.request_id, ending.reason, ending.stop)
        return outputs, _until_ended(events, endings)

    def _trace(
        self, plan: StepPlan | None, result: StepResult | None, events: list[TokenEvent], ended: list[str]
    ) -> None:
        """Record the step, or if there was no plan the ends alone."""
        if plan is not None:
            self._record(ended, lambda: self.tracer.step(plan, result, events, self.clock()))
            return
        for event in events:
            self._record([event.request_id], partial(self._trace_end, event))

    def _trace_end(self, event: TokenEvent) -> None:
        self.tracer.finished(event, self.clock())

    def _record(self, ended: Collection[str], write: Callable[[], None]) -> None:
        """Write a record. If that raises, nobody's answer suffers; ``ended`` requests are let go of."""
        try:
            write()
        except Exception:
            logger.exception("a record of the trace could not be written")
            self.tracer.forget(ended)

    def _completed(
        self, outputs: Iterable[RequestOutput], traces: Mapping[str, RequestTrace | None]
    ) -> list[RequestOutput]:
        """``outputs``, the last ones with what the traces of their requests know: cached tokens and durations."""
        completed = []
        for output in outputs:
            trace = traces.get(output.request_id)
            if output.usage is not None and trace is not None:
                try:
                    output = self._with_facts(output, output.usage, trace)
                except Exception:
                    logger.exception("how long request %s took could not be told", output.request_id)
            completed.append(output)
        return completed

    def _with_facts(self, output: RequestOutput, usage: Usage, trace: RequestTrace) -> RequestOutput:
        usage = replace(usage, cached_tokens=trace.cached_tokens)
        return replace(output, usage=usage, timings=trace.timings(self.clock(), usage.completion_tokens))


def _until_ended(events: Iterable[TokenEvent], endings: Iterable[Ending]) -> list[TokenEvent]:
    """``events`` with these endings, and of each such request none behind the one with which its text has ended."""
    by_name = {ending.event.request_id: ending for ending in endings}
    kept, over = [], set[str]()
    for event in events:
        ending = by_name.get(event.request_id)
        if ending is not None and event is ending.event:
            over.add(event.request_id)
            kept.append(replace(event, finish_reason=ending.reason, stop_reason=ending.stop, failure=None))
        elif event.request_id not in over:
            kept.append(event)
    return kept


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
