"""From token events to text: detokenise, match stop strings, count usage.

Runs on the thread that steps the engine, so that a stop string ends its request before the next step.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from octavo.core.errors import InvalidRequest
from octavo.core.output import RequestOutput, Usage
from octavo.core.plan import FinishReason, SampledToken, TokenEvent
from octavo.core.request import KnownOutput, Request
from octavo.text.detokenizer import Detokenizer
from octavo.text.stop_matcher import StopMatcher, StopStrings
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """A request that its text has ended, at a stop string ("stop") or because none could be made ("error")."""

    event: TokenEvent  # the one with which it has; later ones of the step do not count
    reason: FinishReason
    stop: str  # the stop string, or what went wrong


class _SequenceText:
    """Text state of one sequence: which tokens and characters are out, which are held back.

    Characters of the whole text:   0 ........ released ........ held by the matcher ........ detokenised
    A token is released with the last of its characters; one that holds part of a character waits for the rest. Mostly
    nothing is held back, and a token goes out at once.
    """

    __slots__ = (
        "choice_index",
        "detokenizer",
        "held",
        "matcher",
        "min_tokens",
        "num_tokens",
        "prompt_logprobs",
        "released_chars",
        "request",
        "request_id",
        "skip_chars",
        "unsent",
        "wants_logprobs",
    )

    def __init__(self, request: Request, tokenizer: Tokenizer, stops: StopStrings | None) -> None:
        params = request.sampling
        self.request = request
        self.request_id = request.request_id
        self.choice_index = request.choice_index
        self.wants_logprobs = params.logprobs is not None
        self.min_tokens = params.min_tokens
        self.detokenizer = Detokenizer(tokenizer)
        self.matcher = StopMatcher(stops, include_stop=params.include_stop_str_in_output) if stops else None
        self.held: deque[tuple[SampledToken, int, int]] = deque()  # (token, start, end) in characters of the whole text
        self.released_chars = 0
        self.num_tokens = 0  # tokens drawn, also those that a stop string cut
        self.prompt_logprobs: list[SampledToken] = []  # not told yet
        self.unsent = ""  # text of tokens that were drawn elsewhere
        self.skip_chars = 0  # of the text to come, sent elsewhere
        if request.known_output is not None:
            self._catch_up(request.known_output)

    def _catch_up(self, known: KnownOutput) -> None:
        """Be where the text of these tokens ends. Raises InvalidRequest if it ends the answer."""
        text = ""
        for token_id in known.token_ids:
            released, _, stop = self.push(SampledToken(token_id=token_id), is_text=True)
            text += released
            if stop is not None:
                raise InvalidRequest(f"known_output holds the stop string {stop!r}: the answer is whole")
        self.held.clear()  # told, though their text is not whole
        self.unsent = text[known.num_chars :]
        self.skip_chars = max(0, known.num_chars - len(text))

    @property
    def flows(self) -> bool:
        """Whether the next token can only be kept from going out at once by its own unfinished character."""
        return not (self.matcher or self.held or self.prompt_logprobs or self.unsent or self.skip_chars)

    def pass_on(self, token: SampledToken) -> RequestOutput | None:
        """``push`` and ``output`` in one, for a token of text while all ``flows``: most tokens, and twice as fast."""
        text = self.detokenizer.push(token.token_id)
        start = self.released_chars
        self.num_tokens += 1
        self.released_chars = start + len(text)
        if self.detokenizer.pending:
            self.held.append((token, start, self.released_chars + 1))
            return self.output(text, ()) if text else None
        # without keywords: see hot_record
        logprobs = (token,) if self.wants_logprobs else None
        return RequestOutput(self.request_id, self.choice_index, text, (token.token_id,), logprobs)

    def push(self, token: SampledToken, *, is_text: bool) -> tuple[str, Sequence[SampledToken], str | None]:
        """Take one drawn token; returns text and tokens that may go out, and the stop string completed, if any."""
        detokenizer, matcher = self.detokenizer, self.matcher
        start = detokenizer.num_chars
        piece = detokenizer.push(token.token_id) if is_text else ""
        self.num_tokens += 1
        if matcher is None or self.num_tokens < self.min_tokens:
            released, stop = piece, None  # stop strings count from min_tokens on, as in vLLM
        else:
            released, stop = matcher.push(piece)
        self.released_chars += len(released)
        if not self.held and not detokenizer.pending and stop is None and len(released) == len(piece):
            return released, (token,), None
        unfinished = 1 if is_text and detokenizer.pending else 0
        self.held.append((token, start, detokenizer.num_chars + unfinished))
        return released, self._take(cut=stop is not None), stop

    def flush(self) -> tuple[str, Sequence[SampledToken], str | None]:
        """The held-back rest, when the sequence ends without a stop string (unless the rest completes one)."""
        rest, matcher, stop = self.detokenizer.flush(), self.matcher, None
        if matcher is not None:
            released, stop = matcher.push(rest) if rest else ("", None)
            rest = released if stop is not None else released + matcher.flush()
        self.released_chars += len(rest)
        return rest, self._take(cut=stop is not None, everything=True), stop

    def output(self, text: str, tokens: Sequence[SampledToken]) -> RequestOutput:
        """What is new, with the prompt logprobs that have not been told yet."""
        of_prompt = None
        if self.prompt_logprobs:
            of_prompt, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        ids = (tokens[0].token_id,) if len(tokens) == 1 else tuple([token.token_id for token in tokens])
        logprobs = tuple(tokens) if self.wants_logprobs else None
        if self.unsent or self.skip_chars:
            text = self._not_sent(text)
        # without keywords: see hot_record
        return RequestOutput(self.request_id, self.choice_index, text, ids, logprobs, of_prompt)

    def _not_sent(self, text: str) -> str:
        """What of the text that may go out now has not been sent elsewhere."""
        skipped = min(self.skip_chars, len(text))
        self.skip_chars -= skipped
        text, self.unsent = self.unsent + text[skipped:], ""
        return text

    def _take(self, *, cut: bool, everything: bool = False) -> list[SampledToken]:
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
        return taken


class OutputProcessor:
    """Turns each step's TokenEvents into RequestOutputs. One per engine, one writer: the stepping thread.

    What it does not know, cached tokens and durations, the engine adds to the last output of a request.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._sequences: dict[str, _SequenceText] = {}
        # by the strings; an entry lives as long as a sequence uses it
        self._stops: WeakValueDictionary[tuple[str, ...], StopStrings] = WeakValueDictionary()

    def add(self, request: Request) -> None:
        self._sequences[request.request_id] = _SequenceText(request, self._tokenizer, self._shared_stops(request))

    def discard(self, request_id: str) -> None:
        """Forget a sequence whose last output nobody wants."""
        self._sequences.pop(request_id, None)

    def clear(self) -> None:
        """Forget all of them."""
        self._sequences.clear()

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
            reason: FinishReason = "stop"
            try:
                token = event.token
                if token is not None and event.finish_reason is None and not event.prompt_logprobs and sequence.flows:
                    output, stop = sequence.pass_on(token), None
                else:
                    output, stop = self._process_one(sequence, event)
            except Exception as error:
                logger.exception("the text of request %s could not be made", event.request_id)
                reason, stop = "error", f"{type(error).__name__}: {error}"
                output = self._failed(sequence, stop)
            if output is not None:
                outputs.append(output)
            if stop is not None:
                endings.append(Ending(event, reason, stop))
        return outputs, endings

    def fail(self, events: Sequence[TokenEvent], why: str) -> tuple[list[RequestOutput], list[Ending]]:
        """The same as ``process`` where that raised: all that had news end with an error."""
        news = {event.request_id: event for event in reversed(events) if event.request_id in self._sequences}
        outputs = [self._failed(self._sequences[name], why) for name in news]
        return outputs, [Ending(event, "error", why) for event in news.values()]

    def _failed(self, sequence: _SequenceText, why: str) -> RequestOutput:
        """The last output of a sequence whose text cannot be trusted; the plainest one if even counting it raises."""
        try:
            return self._last_output(sequence, "", (), "error", why)
        except Exception:  # noqa: BLE001 - the first error is logged
            self.discard(sequence.request_id)
            return RequestOutput(
                request_id=sequence.request_id,
                choice_index=sequence.choice_index,
                finish_reason="error",
                stop_reason=why,
            )

    def _shared_stops(self, request: Request) -> StopStrings | None:
        stops = request.sampling.stop
        if not stops:
            return None
        found = self._stops.get(stops)
        if found is None:
            found = self._stops[stops] = StopStrings(stops)
        return found

    def _process_one(self, sequence: _SequenceText, event: TokenEvent) -> tuple[RequestOutput | None, str | None]:
        token, finish = event.token, event.finish_reason
        if event.prompt_logprobs:
            sequence.prompt_logprobs += event.prompt_logprobs
        text, stop = "", None
        tokens: Sequence[SampledToken] = ()
        if token is not None:
            # The token that stops a sequence is counted but has no text, as everywhere.
            text, tokens, stop = sequence.push(token, is_text=finish != "stop")
        if finish is None and stop is None:
            return (sequence.output(text, tokens) if tokens or text else None), None
        if stop is None:
            rest, more, stop = sequence.flush()
            text, tokens = text + rest, (*tokens, *more)
        if stop is not None:
            return self._last_output(sequence, text, tokens, "stop", stop), stop
        output = self._last_output(sequence, text, tokens, finish, event.stop_reason)
        return (output if event.failure is None else replace(output, failure=event.failure)), None

    def _last_output(
        self,
        sequence: _SequenceText,
        text: str,
        tokens: Sequence[SampledToken],
        finish: FinishReason | None,
        stop_reason: int | str | None,
    ) -> RequestOutput:
        request = sequence.request
        self.discard(request.request_id)
        usage = Usage(
            prompt_tokens=len(request.prompt_token_ids), completion_tokens=sequence.num_tokens, cached_tokens=0
        )
        output = sequence.output(text, tokens)
        return replace(output, finish_reason=finish, stop_reason=stop_reason, usage=usage)
