"""From token events to text: detokenise, match stop strings, count usage.

Runs on the thread that steps the engine, so that a stop string ends its request before the next step.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from octavo.core.output import RequestOutput, Timings, Usage
from octavo.core.plan import FinishReason, SampledToken, TokenEvent
from octavo.core.request import Request
from octavo.text.detokenizer import Detokenizer
from octavo.text.stop_matcher import StopMatcher
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """A request that its text has ended, at a stop string ("stop") or because none could be made ("error")."""

    request_id: str
    reason: FinishReason
    stop: str  # the stop string, or what went wrong


class _SequenceText:
    """Text state of one sequence: which tokens and characters are out, which are held back.

    Characters of the whole text:   0 ........ released ........ held by the matcher ........ total
    A token is released with the last of its characters; one that holds part of a character waits for the rest.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        params = request.sampling
        self.request = request
        self.detokenizer = Detokenizer(tokenizer)
        self.matcher = StopMatcher(params.stop, include_stop=params.include_stop_str_in_output)
        self.held: deque[tuple[SampledToken, int, int]] = deque()  # (token, start, end) in characters of the whole text
        self.total_chars = 0
        self.released_chars = 0
        self.num_tokens = 0  # tokens drawn
        self.num_released = 0  # tokens handed out
        self.prompt_logprobs: list[SampledToken] | None = None

    def push(self, token: SampledToken, *, is_text: bool) -> tuple[str, str | None]:
        """Take one drawn token; returns the text that may go out and the stop string it completed, if any."""
        self.num_tokens += 1
        start = self.total_chars
        piece = self.detokenizer.push(token.token_id) if is_text else ""
        self.total_chars += len(piece)
        unfinished = 1 if is_text and self.detokenizer.pending else 0
        self.held.append((token, start, self.total_chars + unfinished))
        if self.num_tokens < self.request.sampling.min_tokens:
            released, stop = piece, None  # stop strings count from min_tokens on, as in vLLM
        else:
            released, stop = self.matcher.push(piece)
        self.released_chars += len(released)
        return released, stop

    def flush(self) -> tuple[str, str | None]:
        """The held-back rest, when the sequence ends without a stop string (unless the rest completes one)."""
        rest = self.detokenizer.flush()
        self.total_chars += len(rest)
        released, stop = self.matcher.push(rest) if rest else ("", None)
        if stop is None:
            released += self.matcher.flush()
        self.released_chars += len(released)
        return released, stop

    def take_tokens(self, *, cut: bool, everything: bool) -> list[SampledToken]:
        """Tokens that go out now: those whose characters all are out; at a cut, those that start before it."""
        taken = []
        while self.held:
            token, start, end = self.held[0]
            if start >= self.released_chars if cut else end > self.released_chars and not everything:
                break
            self.held.popleft()
            taken.append(token)
        if cut:
            self.held.clear()
        self.num_released += len(taken)
        return taken


class OutputProcessor:
    """Turns each step's TokenEvents into RequestOutputs. One per engine, one writer: the stepping thread."""

    def __init__(self, tokenizer: Tokenizer, facts: Callable[[str, int], tuple[int, Timings | None]]) -> None:
        """facts: (request_id, output tokens) -> (cached prompt tokens, timings), asked when a sequence ends."""
        self._tokenizer = tokenizer
        self._facts = facts
        self._sequences: dict[str, _SequenceText] = {}

    def add(self, request: Request) -> None:
        self._sequences[request.request_id] = _SequenceText(request, self._tokenizer)

    def discard(self, request_id: str) -> None:
        """Forget a sequence whose last output nobody wants."""
        self._sequences.pop(request_id, None)

    def process(self, events: Iterable[TokenEvent]) -> tuple[list[RequestOutput], list[Ending]]:
        """Outputs of these events, and the requests that their text has ended.

        The engine must end each of these before its next step, unless its last token has ended it otherwise; the last
        output is among the outputs already. An error in one request's text ends that request alone.
        """
        outputs: list[RequestOutput] = []
        endings: list[Ending] = []
        for event in events:
            sequence = self._sequences.get(event.request_id)
            if sequence is None:
                continue
            if event.prompt_logprobs:
                if sequence.prompt_logprobs is None:
                    sequence.prompt_logprobs = []
                sequence.prompt_logprobs.extend(event.prompt_logprobs)
            reason: FinishReason = "stop"
            try:
                output, stop = self._process_one(sequence, event)
            except Exception as error:
                logger.exception("the text of request %s could not be made", event.request_id)
                reason, stop = "error", f"{type(error).__name__}: {error}"
                output = self._output(sequence, "", [], reason, stop)
            if output is not None:
                outputs.append(output)
            if stop is not None:
                endings.append(Ending(event.request_id, reason, stop))
        return outputs, endings

    def _process_one(self, sequence: _SequenceText, event: TokenEvent) -> tuple[RequestOutput | None, str | None]:
        text, stop, finish, stop_reason = "", None, event.finish_reason, event.stop_reason
        if event.token is not None:
            # The token that stops a sequence is counted but has no text, as everywhere.
            text, stop = sequence.push(event.token, is_text=finish != "stop")
        if finish is not None and stop is None:
            rest, stop = sequence.flush()
            text += rest
        if stop is not None:
            finish, stop_reason = "stop", stop
        tokens = sequence.take_tokens(cut=stop is not None, everything=finish is not None)
        if not tokens and not text and finish is None:
            return None, None
        return self._output(sequence, text, tokens, finish, stop_reason), stop

    def _output(
        self,
        sequence: _SequenceText,
        text: str,
        tokens: list[SampledToken],
        finish: FinishReason | None,
        stop_reason: int | str | None,
    ) -> RequestOutput:
        request = sequence.request
        usage = timings = None
        if finish is not None:
            self.discard(request.request_id)
            cached_tokens, timings = self._facts(request.request_id, sequence.num_tokens)
            usage = Usage(
                prompt_tokens=len(request.prompt_token_ids),
                completion_tokens=sequence.num_released,
                cached_tokens=cached_tokens,
            )
        prompt_logprobs = sequence.prompt_logprobs
        sequence.prompt_logprobs = None
        return RequestOutput(
            request_id=request.request_id,
            choice_index=request.choice_index,
            text=text,
            token_ids=tuple(token.token_id for token in tokens),
            logprobs=tuple(tokens) if request.sampling.logprobs is not None else None,
            prompt_logprobs=tuple(prompt_logprobs) if prompt_logprobs is not None else None,
            finish_reason=finish,
            stop_reason=stop_reason,
            usage=usage,
            timings=timings,
        )
