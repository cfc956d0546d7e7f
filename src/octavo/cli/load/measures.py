"""Figures of a run. ``docs/benchmarking.md`` defines each; ``sample`` has those of a single request."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.cli.distributions import distribution
from octavo.cli.load.sample import Sample
from octavo.core.errors import ConfigError

#: Latencies of a request: name -> property of Sample.
REQUEST_LATENCIES = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}


@dataclass(frozen=True, slots=True)
class Target:
    """What a user still calls good: limits in seconds by name, of ttft, tpot and e2e."""

    limits_s: Mapping[str, float]

    @classmethod
    def parse(cls, words: Iterable[str]) -> Target:
        """``ttft:500 tpot:50``, in milliseconds. Raises ConfigError."""
        limits_s = {}
        for word in words:
            name, _, value = word.partition(":")
            try:
                limits_s[name] = float(value) / 1e3
            except ValueError:
                limits_s[name] = -1.0
            if name not in REQUEST_LATENCIES or not 0 < limits_s[name] < 1e9:
                raise ConfigError(
                    f"{word!r} is no latency target; write ttft:500, tpot:50 or e2e:9000, in milliseconds"
                )
        return cls(limits_s)

    def is_met_by(self, sample: Sample) -> bool:
        """Answered, and within every limit. An answer that came all at once has no TPOT to exceed."""
        if sample.failure is not None:
            return False
        for name, limit_s in self.limits_s.items():
            value = getattr(sample, REQUEST_LATENCIES[name])
            if value is not None and value > limit_s:
                return False
        return True

    def __str__(self) -> str:
        return " ".join(f"{name}:{limit_s * 1e3:g}" for name, limit_s in self.limits_s.items())


def answered(samples: Iterable[Sample]) -> list[Sample]:
    """Those that count: complete answers. Nothing is measured on a failed request."""
    return [sample for sample in samples if sample.failure is None]


def latencies(samples: Iterable[Sample]) -> dict[str, dict[str, float] | None]:
    """Distributions in seconds of answered requests: TTFT, TPOT, E2E over requests, ITL over gaps."""
    good = answered(samples)

    def over_requests(name: str) -> dict[str, float] | None:
        return distribution(value for sample in good if (value := getattr(sample, name)) is not None)

    return {
        "ttft_s": over_requests("ttft_s"),
        "tpot_s": over_requests("tpot_s"),
        "itl_s": distribution(gap for sample in good for gap in sample.itl_s),
        "e2e_s": over_requests("e2e_s"),
    }


def interference(samples: Sequence[Sample]) -> dict[str, dict[str, float] | None]:
    """TTFT and ITL of the chats, apart: waits that overlap a long prompt's for its first token, and the others.

    A long prompt that failed disturbed from its arrival to its end.
    """
    windows = [
        (sample.arrival_s, sample.event_times_s[0] if sample.event_times_s else sample.end_s or float("inf"))
        for sample in samples
        if sample.group == "long"
    ]
    apart: dict[str, list[float]] = {f"{name}_{when}_s": [] for name in ("ttft", "itl") for when in ("alone", "during")}
    for sample in answered(samples):
        if sample.group == "chat":
            for index, (earlier, later) in enumerate(itertools.pairwise([sample.arrival_s, *sample.arrivals_s])):
                meets = any(begin < later and earlier < end for begin, end in windows)
                apart[f"{'itl' if index else 'ttft'}_{'during' if meets else 'alone'}_s"].append(later - earlier)
    return {name: distribution(waits) for name, waits in apart.items()}


def failures(samples: Iterable[Sample]) -> list[tuple[str, int | None, str, int]]:
    """(kind, status, message, how often), most frequent first."""
    found = Counter((s.failure, s.status, s.message) for s in samples if s.failure not in (None, "interrupted"))
    return [(str(kind), status, message, count) for (kind, status, message), count in found.most_common()]


def totals(samples: Sequence[Sample], duration_s: float, target: Target) -> dict[str, Any]:
    """Throughput over the run's duration, of answered requests only; goodput; what the samples say about themselves."""
    good = answered(samples)
    output = sum(sample.output_tokens for sample in good)
    counted = [sample.prompt_tokens for sample in good if sample.prompt_tokens is not None]
    prompt = sum(counted) if len(counted) == len(good) else None
    cached = [sample.cached_tokens for sample in good if sample.cached_tokens is not None]
    events = sum(len(sample.event_times_s) for sample in good)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    met = sum(target.is_met_by(sample) for sample in good)
    checked = [sample for sample in good if sample.valid_json is not None]
    return {
        "requests": sum(sample.failure != "interrupted" for sample in samples),
        "answered": len(good),
        "interrupted": sum(sample.failure == "interrupted" for sample in samples),
        "shorter_than_asked": sum(sample.output_tokens < sample.asked_output_tokens for sample in good),
        "duration_s": duration_s,
        "requests_per_s": len(good) * per_s,
        "output_tokens": output,
        "output_tokens_per_s": output * per_s,
        "prompt_tokens": prompt,  # None if the server did not count them all
        "cached_tokens": sum(cached) if cached else None,
        "total_tokens_per_s": None if prompt is None else (prompt + output) * per_s,
        "tokens_per_event": output / events if events else None,
        "arrivals_of_output": sum(len(sample.arrivals_s) for sample in good),
        "counted_by": dict(Counter(sample.counted_by for sample in good)),
        "goodput_target_ms": {name: limit_s * 1e3 for name, limit_s in target.limits_s.items()},
        "goodput_requests": met if target.limits_s else None,
        "goodput_requests_per_s": met * per_s if target.limits_s else None,
        "checked_json": len(checked),
        "valid_json": sum(bool(sample.valid_json) for sample in checked),
        "cut_json": sum(not sample.valid_json and sample.finish_reason == "length" for sample in checked),
    }
