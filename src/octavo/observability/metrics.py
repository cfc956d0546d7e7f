"""Latency and throughput over recent windows of time.

The engine thread writes, and hands out *snapshots*: references to what does not change any more and a copy of the
little that does, some microseconds. Sorting and summing happen wherever the snapshot is read.
"""

from __future__ import annotations

import struct
from array import array
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import FinishReason

#: The longest window that throughput can be asked for.
MAX_WINDOW_S = 3600
_ENTRY = struct.Struct("<ddq")  # of a TimedRing: time, value, how often
_ENTRIES = np.dtype([("time_s", "<f8"), ("value", "<f8"), ("repeats", "<i8")])  # the same, for reading
_PAGE = 4096  # entries of a TimedRing that lie together

Entries = NDArray[np.void]  # of _ENTRIES


class TimedRing:
    """The newest ``capacity`` entries: a time, a value, how often it was seen; 24 bytes each.

    They lie in pages. A full page is never written again, so a snapshot shares it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._page_entries = min(capacity, _PAGE)
        self._full: deque[bytearray] = deque(maxlen=-(-capacity // self._page_entries))
        self._page = bytearray(_ENTRY.size * self._page_entries)
        self._used = 0  # entries of the last page

    def add(self, now: float, value: float, repeats: int = 1) -> None:
        if self._used == self._page_entries:
            self._full.append(self._page)
            self._page, self._used = bytearray(_ENTRY.size * self._page_entries), 0
        _ENTRY.pack_into(self._page, self._used * _ENTRY.size, now, value, repeats)
        self._used += 1

    def snapshot(self) -> RingSnapshot:
        return RingSnapshot((*self._full, bytes(memoryview(self._page)[: self._used * _ENTRY.size])), self._capacity)


@dataclass(frozen=True, slots=True)
class RingSnapshot:
    """The entries of a ring at one moment."""

    pages: tuple[bytes | bytearray, ...]  # oldest first
    capacity: int

    def since(self, start: float) -> Entries:
        """What was added at or after ``start``, oldest first."""
        entries = np.concatenate([np.frombuffer(page, _ENTRIES) for page in self.pages])[-self.capacity :]
        return entries[entries["time_s"] >= start]


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

    def snapshot(self) -> SumsSnapshot:
        return SumsSnapshot(self._seconds.tobytes(), self._sums.tobytes())


@dataclass(frozen=True, slots=True)
class SumsSnapshot:
    """The sums per second at one moment."""

    seconds: bytes  # int64
    sums: bytes  # float64

    def since(self, second: int) -> float:
        """The sum from the start of ``second`` on."""
        return float(np.frombuffer(self.sums)[np.frombuffer(self.seconds, np.int64) >= second].sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Mean and percentiles of a sample; None where it is empty. Percentiles by nearest rank."""

    count: int
    mean: float | None
    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, values: NDArray[np.float64], repeats: NDArray[np.int64]) -> Summary:
        """Of values that were each seen ``repeats`` times."""
        if not len(values):
            return cls(count=0, mean=None, p50=None, p99=None)
        order = np.argsort(values)  # numpy sorts without the GIL
        values, ends = values[order], np.cumsum(repeats[order])
        count = int(ends[-1])

        def rank(share: float) -> float:
            return float(values[np.searchsorted(ends, min(count - 1, int(share * count)), side="right")])

        mean = float(np.dot(values, repeats[order])) / count
        return cls(count=count, mean=mean, p50=rank(0.5), p99=rank(0.99))


class Metrics:
    """Rings of latencies and sums of tokens. The engine thread writes; ``snapshot`` is for reading.

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

    def snapshot(self, now: float) -> MetricsSnapshot:
        """All of it at this moment, cheaply."""
        return MetricsSnapshot(
            now=now,
            ttft_s=self._ttft.snapshot(),
            tpot_s=self._tpot.snapshot(),
            itl_s=self._itl.snapshot(),
            step_s=self._step_s.snapshot(),
            prompt_tokens=self._prefill_tokens.snapshot(),
            output_tokens=self._output_tokens.snapshot(),
            started_s=self._started_s,
            requests_ended=dict(self.requests_ended),
            steps=self.steps,
            preemptions=self.preemptions,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSnapshot:
    """The metrics at one moment; any thread may work on it."""

    now: float
    ttft_s: RingSnapshot
    tpot_s: RingSnapshot
    itl_s: RingSnapshot
    step_s: RingSnapshot
    prompt_tokens: SumsSnapshot
    output_tokens: SumsSnapshot
    started_s: float | None
    requests_ended: dict[FinishReason, int]
    steps: int
    preemptions: int

    def latencies(self, window_s: float) -> dict[str, Summary]:
        """TTFT, TPOT, ITL and step time in seconds, of what happened in the last ``window_s``."""
        start = self.now - window_s
        rings = {"ttft_s": self.ttft_s, "tpot_s": self.tpot_s, "itl_s": self.itl_s, "step_s": self.step_s}
        found = {name: ring.since(start) for name, ring in rings.items()}
        return {name: Summary.of(entries["value"], entries["repeats"]) for name, entries in found.items()}

    def throughput(self, window_s: float) -> dict[str, float]:
        """Tokens per second over the last ``window_s`` (at most an hour), or since the first step if that is less."""
        first_second = int(self.now - window_s)
        watched_s = self.now - max(first_second, self.now if self.started_s is None else self.started_s)
        sums = {"prompt_tokens_per_s": self.prompt_tokens, "output_tokens_per_s": self.output_tokens}
        return {
            name: per_second.since(first_second) / watched_s if watched_s else 0.0 for name, per_second in sums.items()
        }
