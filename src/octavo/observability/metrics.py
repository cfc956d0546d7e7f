"""Latency and throughput over recent windows of time."""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from octavo.core.plan import FinishReason

#: The longest window that throughput can be asked for.
MAX_WINDOW_S = 3600
_ENTRY = struct.Struct("<ddq")  # of a TimedRing: time, value, how often


class TimedRing:
    """The newest ``capacity`` entries: a time, a value, how often it was seen; 24 bytes each, preallocated."""

    def __init__(self, capacity: int) -> None:
        self._entries = bytearray(_ENTRY.size * capacity)
        self._capacity = capacity
        self._count = 0

    def add(self, now: float, value: float, repeats: int = 1) -> None:
        _ENTRY.pack_into(self._entries, self._count % self._capacity * _ENTRY.size, now, value, repeats)
        self._count += 1

    def since(self, start: float) -> list[tuple[float, int]]:
        """(value, how often) of what was added at or after ``start``, newest first."""
        found = []
        for index in range(self._count - 1, max(-1, self._count - self._capacity - 1), -1):
            time_s, value, repeats = _ENTRY.unpack_from(self._entries, index % self._capacity * _ENTRY.size)
            if time_s < start:
                break
            found.append((value, repeats))
        return found


class SecondSums:
    """Sums per whole second of the clock, of the newest ``capacity`` seconds; 16 bytes each, preallocated."""

    def __init__(self, capacity: int) -> None:
        self._seconds = array("q", [-1]) * capacity  # which second a slot holds
        self._sums = array("d", bytes(8 * capacity))
        self._capacity = capacity

    def add(self, now: float, value: float) -> None:
        second = int(now)
        slot = second % self._capacity
        if self._seconds[slot] != second:
            self._seconds[slot], self._sums[slot] = second, 0.0
        self._sums[slot] += value

    def since(self, second: int) -> float:
        """The sum from the start of ``second`` on."""
        return sum(total for start, total in zip(self._seconds, self._sums, strict=True) if start >= second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Mean and percentiles of a sample; None where it is empty. Percentiles by nearest rank."""

    count: int
    mean: float | None
    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Iterable[tuple[float, int]]) -> Summary:
        """values: (value, how often) pairs."""
        ordered = sorted(values)
        if not ordered:
            return cls(count=0, mean=None, p50=None, p99=None)
        ends = list(accumulate(repeats for _, repeats in ordered))
        count = ends[-1]

        def rank(share: float) -> float:
            return ordered[bisect_right(ends, min(count - 1, int(share * count)))][0]

        mean = sum(value * repeats for value, repeats in ordered) / count
        return cls(count=count, mean=mean, p50=rank(0.5), p99=rank(0.99))


class Metrics:
    """Rings of latencies and sums of tokens. The engine thread writes and reads.

    capacity: inter-token latencies kept, where those of one step that are equal count once. Of the other latencies the
              newest 4096 requests and 16384 steps are kept; a busy server fills these within a long window, and
              ``Summary.count`` says how many there were.
    """

    def __init__(self, *, capacity: int = 65536) -> None:
        self._ttft = TimedRing(4096)
        self._tpot = TimedRing(4096)
        self._itl = TimedRing(capacity)
        self._prefill_tokens = SecondSums(MAX_WINDOW_S + 1)
        self._output_tokens = SecondSums(MAX_WINDOW_S + 1)
        self._started_s: float | None = None  # of the first step
        self._step_s = TimedRing(16384)
        self.requests_ended: dict[FinishReason, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.steps = 0
        self.preemptions = 0

    def first_token(self, ttft_s: float, now: float) -> None:
        self._ttft.add(now, ttft_s)

    def next_tokens(self, itl_s: float, now: float, *, requests: int = 1) -> None:
        """So many requests drew a further token, each ``itl_s`` after its last."""
        self._itl.add(now, itl_s, requests)

    def request_ended(self, reason: FinishReason) -> None:
        self.requests_ended[reason] += 1

    def answered(self, tpot_s: float, now: float) -> None:
        """A request that drew several tokens has ended."""
        self._tpot.add(now, tpot_s)

    def step(
        self, *, now: float, duration_s: float | None, prompt_tokens: int, output_tokens: int, preemptions: int
    ) -> None:
        """duration_s: None if the step failed, and with it all that it ran."""
        self.steps += 1
        self.preemptions += preemptions
        if duration_s is None:
            return
        if self._started_s is None:
            self._started_s = now - duration_s
        if prompt_tokens:
            self._prefill_tokens.add(now, prompt_tokens)
        if output_tokens:
            self._output_tokens.add(now, output_tokens)
        self._step_s.add(now, duration_s)

    def latencies(self, now: float, window_s: float) -> dict[str, Summary]:
        """TTFT, TPOT, ITL and step time in seconds, of what happened in the last ``window_s``."""
        start = now - window_s
        rings = {"ttft_s": self._ttft, "tpot_s": self._tpot, "itl_s": self._itl, "step_s": self._step_s}
        return {name: Summary.of(ring.since(start)) for name, ring in rings.items()}

    def throughput(self, now: float, window_s: float) -> dict[str, float]:
        """Tokens per second over the last ``window_s`` (at most an hour), or since the first step if that is less."""
        first_second = int(now - window_s)
        watched_s = now - max(first_second, now if self._started_s is None else self._started_s)
        sums = {"prompt_tokens_per_s": self._prefill_tokens, "output_tokens_per_s": self._output_tokens}
        return {
            name: per_second.since(first_second) / watched_s if watched_s else 0.0 for name, per_second in sums.items()
        }
