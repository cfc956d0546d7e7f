"""One request as its client saw it: every event with its time, and the figures that follow."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.cli.load.sse import EventSplitter

#: Why a request counts as failed.
FailureKind = Literal[
    "connection",  # none could be made, or it ended before an answer began
    "status",  # answered, but not with 200
    "timeout",  # not complete within --timeout
    "truncated",  # the stream broke off: no finish_reason, no [DONE]
    "error event",  # an error in the middle of a stream
    "protocol",  # 200, but no stream of JSON events
    "empty",  # complete, without a token
    "short",  # fewer tokens than asked, although the server was told to ignore the end-of-sequence token
    "interrupted",  # by Ctrl-C: in flight at the end, counted neither as answered nor as failed
]
CountedBy = Literal["usage", "events' own counts", "events"]
#: Of an answer that is no stream, and of messages in reports.
_MAX_KEPT_BYTES = 64 << 10
_MAX_MESSAGE_CHARS = 300
#: Fields of a delta that are output, besides content and tool_calls.
_OTHER_OUTPUT = ("reasoning_content", "reasoning", "refusal")


@dataclass(slots=True, kw_only=True)
class Sample:
    """Times in seconds from the start of the run."""

    index: int  # in the workload
    group: str  # "" or what is reported apart: "chat", "long"
    asked_prompt_tokens: int | None
    asked_output_tokens: int
    arrival_s: float  # when it was due; every latency counts from here
    sent_s: float | None = None  # when its bytes went out; later than its arrival only if the client was late
    end_s: float | None = None
    event_times_s: list[float] = field(default_factory=list)  # of each event that carries output
    event_tokens: list[int | None] = field(default_factory=list)  # its tokens; None where the server does not say
    prompt_tokens: int | None = None  # usage, like the two below
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    status: int | None = None
    finish_reason: str | None = None
    failure: FailureKind | None = None
    message: str = ""
    valid_json: bool | None = None  # where JSON was asked for: whether the answer parses

    @property
    def counted_by(self) -> CountedBy:
        """Where ``output_tokens`` comes from."""
        if self.completion_tokens is not None:
            return "usage"
        return "events" if None in self.event_tokens else "events' own counts"

    @property
    def output_tokens(self) -> int:
        """From the server's usage; else as its events say; else one per event."""
        if self.completion_tokens is not None:
            return self.completion_tokens
        return sum(1 if tokens is None else tokens for tokens in self.event_tokens)

    @property
    def arrivals_s(self) -> list[float]:
        """When output arrived, each time once: events that one read brought are one arrival."""
        return list(dict.fromkeys(self.event_times_s))

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: arrival to the first output."""
        return self.event_times_s[0] - self.arrival_s if self.event_times_s else None

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: the gaps between arrivals of output. Tokens that come together have none between."""
        return [later - earlier for earlier, later in itertools.pairwise(self.arrivals_s)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first arrival; None if everything came at once.

        Where the server does not say what its first arrival held, the tokens are taken as spread evenly over events.
        """
        times = self.event_times_s
        if not times or times[-1] == times[0]:
            return None
        first = [tokens for time_s, tokens in zip(times, self.event_tokens, strict=True) if time_s == times[0]]
        even = self.output_tokens / len(times)
        rest = self.output_tokens - sum(even if tokens is None else tokens for tokens in first)
        return (times[-1] - times[0]) / rest if rest > 0 else None

    @property
    def e2e_s(self) -> float | None:
        """Arrival to the end of the answer."""
        return None if self.end_s is None else self.end_s - self.arrival_s

    def fail(self, kind: FailureKind, message: str = "") -> None:
        """The first reason stands."""
        if self.failure is None:
            self.failure, self.message = kind, message[:_MAX_MESSAGE_CHARS]


class AnswerRecorder:
    """Fills a sample from an answer as it arrives: an ``http.Receiver``."""

    def __init__(self, sample: Sample, expect: Literal["json", "tool_calls"] | None = None) -> None:
        self._sample = sample
        self._expect = expect
        self._splitter = EventSplitter()
        self._is_stream = False
        self._body = b""  # of an answer that is no stream
        self._done = False  # [DONE] was seen
        self._json: defaultdict[int | None, str] = defaultdict(str)  # what should be JSON: arguments by call, or text

    def on_response(self, status: int, content_type: str) -> None:
        self._sample.status = status
        self._is_stream = status == 200 and content_type.partition(";")[0].strip().lower() == "text/event-stream"

    def on_body(self, data: bytes, now_s: float) -> None:
        """Raises ValueError for what is no stream of JSON events."""
        if not self._is_stream:
            self._body = (self._body + data)[:_MAX_KEPT_BYTES]
            return
        for event in self._splitter.feed(data):
            self._event(event, now_s)

    def close(self, now_s: float) -> None:
        """The answer is complete as HTTP: was it one? Sets ``failure`` if not."""
        sample = self._sample
        sample.end_s = now_s
        if sample.status != 200:
            sample.fail("status", error_message(self._body))
            return
        if not self._is_stream:
            sample.fail("protocol", "the answer is not text/event-stream, although stream was true")
            return
        try:
            for event in self._splitter.close():
                self._event(event, now_s)
        except ValueError:
            sample.fail("truncated", "the last event is cut off")
        if sample.finish_reason is None and not self._done:
            sample.fail("truncated", "the stream ended without finish_reason and without [DONE]")
        elif sample.output_tokens == 0 or not sample.event_times_s:
            sample.fail("empty", "complete, without output")
        if self._expect is not None:
            sample.valid_json = bool(self._json) and all(map(_is_json, self._json.values()))

    def _event(self, event: bytes, now_s: float) -> None:
        if event == b"[DONE]":
            self._done = True
            return
        chunk = json.loads(event)
        try:
            self._chunk(chunk, now_s)
        except (AttributeError, TypeError) as error:
            raise ValueError(f"an event is not shaped like OpenAI's: {event[:80]!r}") from error

    def _chunk(self, chunk: Mapping[str, Any], now_s: float) -> None:
        sample = self._sample
        if chunk.get("error"):
            sample.fail("error event", error_message(json.dumps(chunk).encode()))
            return
        before, usage = sample.completion_tokens or 0, chunk.get("usage")
        if usage:
            self._usage(usage)
        has_text, counts = False, []
        for choice in chunk.get("choices") or ():
            sample.finish_reason = choice.get("finish_reason") or sample.finish_reason
            has_text |= self._output(choice)
            counts.append(token_count(choice))
        known = [count for count in counts if count is not None]
        if not has_text and not sum(known):
            return
        if not known and usage and None not in sample.event_tokens:  # usage in every chunk: what it has grown by
            known = [(sample.completion_tokens or 0) - before]
        sample.event_times_s.append(now_s)
        sample.event_tokens.append(sum(known) if known else None)

    def _output(self, choice: Mapping[str, Any]) -> bool:
        """Whether a choice of a chunk says anything: text, reasoning, a part of a tool call."""
        delta = choice.get("delta")
        if delta is None:
            return bool(choice.get("text"))
        content = delta.get("content")
        if self._expect == "json" and content:
            self._json[None] += content
        calls = delta.get("tool_calls") or ()
        if self._expect == "tool_calls":
            for call in calls:
                self._json[call.get("index")] += (call.get("function") or {}).get("arguments") or ""
        return bool(content or calls or any(delta.get(name) for name in _OTHER_OUTPUT))

    def _usage(self, usage: Mapping[str, Any]) -> None:
        sample = self._sample
        sample.prompt_tokens = _count(usage.get("prompt_tokens"), sample.prompt_tokens)
        sample.completion_tokens = _count(usage.get("completion_tokens"), sample.completion_tokens)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            sample.cached_tokens = _count(details.get("cached_tokens"), sample.cached_tokens)


def token_count(choice: Mapping[str, Any]) -> int | None:
    """How many tokens a choice of a chunk holds, where it says: by token ids or by logprobs."""
    token_ids = choice.get("token_ids")
    if isinstance(token_ids, list):
        return len(token_ids)
    logprobs = choice.get("logprobs")
    if isinstance(logprobs, dict):
        entries = logprobs.get("content") if "content" in logprobs else logprobs.get("tokens")
        if isinstance(entries, list):
            return len(entries)
    return None


def error_message(body: bytes) -> str:
    """The message in an error's body: OpenAI's form, FastAPI's, or the first of the text. One line."""
    text = body.decode(errors="replace")
    try:
        found = json.loads(text)
    except ValueError:
        return " ".join(text.split())[:_MAX_MESSAGE_CHARS]
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    return " ".join((found if isinstance(found, str) else json.dumps(found)).split())[:_MAX_MESSAGE_CHARS]


def _count(value: Any, otherwise: int | None) -> int | None:
    return value if type(value) is int and value >= 0 else otherwise


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
