"""Ratios of two contenders over rounds, with an interval: what a table of peers is made of.

A round runs both, one soon after the other, so that a machine that is slower for a while is slower for both: the ratio
is taken within each round. Over rounds, the geometric mean and Student's t interval of the logarithms.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond the table, the normal distribution's.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
_Z95 = 1.960


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How many times as fast: above 1, the first one is the faster. ``low`` and ``high``: 95 %; None of one round."""

    value: float
    low: float | None
    high: float | None
    rounds: int

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} ({self.low:.2f} - {self.high:.2f})"


def ratio_of(ours: Mapping[int, float], theirs: Mapping[int, float], *, more_is_better: bool) -> Ratio | None:
    """The ratio of two figures by round; None if there is no round with both. Figures are above 0."""
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        return None
    sign = 1 if more_is_better else -1
    logs = [sign * math.log(ours[index] / theirs[index]) for index in shared]
    return interval_of(logs)


def interval_of(logs: Sequence[float]) -> Ratio:
    """Geometric mean and 95 % interval of ratios, from their logarithms."""
    middle, count = statistics.fmean(logs), len(logs)
    if count == 1:
        return Ratio(value=math.exp(middle), low=None, high=None, rounds=1)
    half = t95(count - 1) * statistics.stdev(logs) / math.sqrt(count)
    return Ratio(value=math.exp(middle), low=math.exp(middle - half), high=math.exp(middle + half), rounds=count)


def t95(degrees: int) -> float:
    """Half the width of a two-sided 95 % interval in standard errors."""
    return _T95[degrees - 1] if degrees <= len(_T95) else _Z95
