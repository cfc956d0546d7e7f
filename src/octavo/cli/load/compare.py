"""Two runs side by side: ratios, with the interval that resampling gives them.

Requests are resampled, not gaps: the gaps of one answer belong together (a cluster bootstrap). Throughput is resampled
by windows of time. An interval says how much one run of each would vary by chance, not what another day, another
machine or a warm cache would do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.cli.load.measures import answered
from octavo.cli.load.record import Recorded
from octavo.cli.load.sample import Sample
from octavo.cli.tables import Table

_RESAMPLES = 1000
#: Values that one measure may touch over all its resamples; beyond, there are fewer of these.
_MAX_WORK = 200_000_000
_MIN_RESAMPLES = 100
_WINDOWS = 20

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """B over A for one measure. ``interval`` (95 %) is None with too few samples to say."""

    name: str
    unit: str
    a: float
    b: float
    interval: tuple[float, float] | None
    is_better_high: bool

    @property
    def ratio(self) -> float | None:
        return self.b / self.a if self.a > 0 else None

    @property
    def verdict(self) -> str:
        """``better``, ``worse`` (B than A), or nothing where the interval holds 1."""
        if self.interval is None or self.interval[0] <= 1 <= self.interval[1]:
            return ""
        return "better" if (self.interval[0] > 1) == self.is_better_high else "worse"


def compare(a: Recorded, b: Recorded, seed: int = 0) -> list[Ratio]:
    """Every measure that both runs have. ITL of chats that long prompts disturb stands apart, as in the report."""
    found = [_throughput(a, b, np.random.default_rng(seed))]
    for label, group, attribute in _latencies(a, b):
        values_a, values_b = _per_request(a.samples, group, attribute), _per_request(b.samples, group, attribute)
        if not values_a or not values_b:
            continue
        for name, statistic, fewest in _STATISTICS:
            joined_a, joined_b = np.concatenate(values_a), np.concatenate(values_b)
            interval = None
            if min(len(joined_a), len(joined_b)) >= fewest:
                interval = _interval(values_a, values_b, statistic, np.random.default_rng(seed))
            one, other = statistic(joined_a) * 1e3, statistic(joined_b) * 1e3
            found.append(
                Ratio(name=f"{label} {name}", unit="ms", a=one, b=other, interval=interval, is_better_high=False)
            )
    return found


def _nearest_rank(percent: int) -> Callable[[Values], float]:
    def statistic(values: Values) -> float:
        rank = max(0, -(-len(values) * percent // 100) - 1)
        return float(np.partition(values, rank)[rank])

    return statistic


#: (name, function, values from which on there is an interval). The P99 of fewer than 100 is their maximum, which
#: resampling cannot exceed: its interval would be too narrow.
_STATISTICS: tuple[tuple[str, Callable[[Values], float], int], ...] = (
    ("mean", lambda values: float(np.mean(values)), 2),
    ("P50", _nearest_rank(50), 2),
    ("P99", _nearest_rank(99), 100),
)


def _latencies(a: Recorded, b: Recorded) -> Iterator[tuple[str, str, str]]:
    """(label, group, property of Sample)."""
    groups = {sample.group for sample in a.samples} & {sample.group for sample in b.samples}
    for group in sorted(groups):
        before = f"{group} " if group else ""
        for name in ("ttft", "e2e") if group == "long" else ("ttft", "tpot", "itl", "e2e"):
            yield f"{before}{name.upper()}", group, f"{name}_s"


def _per_request(samples: Sequence[Sample], group: str, attribute: str) -> list[Values]:
    """One array per answered request that has any."""
    found = []
    for sample in answered(samples):
        value = getattr(sample, attribute)
        if sample.group == group and value is not None and value != []:
            found.append(np.atleast_1d(np.asarray(value, np.float64)))
    return found


def _interval(
    a: Sequence[Values], b: Sequence[Values], statistic: Callable[[Values], float], rng: np.random.Generator
) -> tuple[float, float] | None:
    """95 % of the ratio b / a under resampling of requests, both sides each time."""
    if min(len(a), len(b)) < 2:
        return None
    work = sum(map(len, a)) + sum(map(len, b))
    resamples = max(_MIN_RESAMPLES, min(_RESAMPLES, _MAX_WORK // work))
    ratios = []
    for _ in range(resamples):
        one, other = (
            statistic(np.concatenate([values[index] for index in rng.integers(len(values), size=len(values))]))
            for values in (a, b)
        )
        if one > 0:
            ratios.append(other / one)
    return _middle(ratios)


def _middle(ratios: Sequence[float]) -> tuple[float, float] | None:
    if not ratios:
        return None
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)


def _throughput(a: Recorded, b: Recorded, rng: np.random.Generator) -> Ratio:
    windows = [_window_tokens(run) for run in (a, b)]
    rates = [float(tokens.sum()) / run.duration_s for tokens, run in zip(windows, (a, b), strict=True)]
    scale = a.duration_s / b.duration_s  # of one window's tokens to tokens per second, both sides
    sums = [rng.choice(tokens, size=(_RESAMPLES, _WINDOWS)).sum(axis=1) for tokens in windows]
    interval = _middle([float(other / one * scale) for one, other in zip(*sums, strict=True) if one > 0])
    return Ratio(name="output tokens/s", unit="", a=rates[0], b=rates[1], interval=interval, is_better_high=True)


def _window_tokens(run: Recorded) -> Values:
    """Output tokens of answered requests in each of ``_WINDOWS`` equal stretches of the run."""
    tokens = np.zeros(_WINDOWS)
    for sample in answered(run.samples):
        if not sample.event_times_s:
            continue
        each = sample.output_tokens / len(sample.event_times_s)  # where they fall within an answer matters little
        for time_s in sample.event_times_s:
            tokens[min(_WINDOWS - 1, math.floor(time_s / run.duration_s * _WINDOWS))] += each
    return tokens


def differences(a: Recorded, b: Recorded) -> list[str]:
    """What else is different between the runs: facts that a ratio would wrongly be read as the server's."""
    told = []
    for section, wanted in _COMPARED.items():
        one, other = _flat(a.facts[section], wanted), _flat(b.facts[section], wanted)
        different = [key for key in one.keys() | other.keys() if one.get(key) != other.get(key)]
        told += [f"{section}.{key}: {_short(one.get(key))} / {_short(other.get(key))}" for key in sorted(different)]
    for label, run in (("A", a), ("B", b)):
        total = run.facts["totals"]
        if total["answered"] < total["requests"] or total["interrupted"]:
            told.append(f"{label}: {total['answered']} of {total['requests']} requests answered")
    return told


_COMPARED = {
    "plan": {"workload", "arrivals", "num_requests", "seed", "trace_requests", "speed", "long_prompt", "num_long"},
    "server": {"model", "endpoint", "optional_fields", "extra", "temperature", "prompt_maker"},
    "host": {"cpu", "cores", "system"},
}


def _flat(facts: Mapping[str, Any], wanted: Collection[str], before: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` -> ``{"a.b": 1}``, of the wanted keys of the top."""
    found: dict[str, Any] = {}
    for key, value in facts.items():
        if before or key in wanted:
            found |= _flat(value, (), f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return found


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def ratio_table(ratios: Sequence[Ratio]) -> Table:
    """What the comparison found, measure by measure."""
    rows = []
    for found in ratios:
        name = f"{found.name}, {found.unit}" if found.unit else found.name
        ratio = "-" if found.ratio is None else f"{found.ratio:.3f}"
        interval = "-" if found.interval is None else f"{found.interval[0]:.3f} - {found.interval[1]:.3f}"
        rows.append([name, f"{found.a:,.1f}", f"{found.b:,.1f}", ratio, interval, found.verdict])
    headings = ["", "A", "B", "B / A", "95 % interval", "B is"]
    return Table(headings=headings, rows=rows, text=(0, 5))
