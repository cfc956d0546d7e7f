"""Lengths to draw and latencies to summarise: what every latency benchmark shares."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.core.errors import ConfigError

#: What a distribution is summarised by, besides mean and extremes.
PERCENTILES = (50, 90, 95, 99)

_RANGE = re.compile(r"([0-9]+)(?::([0-9]+))?")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A uniform distribution over whole numbers from ``low`` to ``high``, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """``128`` -> always 128; ``32:512`` -> 32 to 512. ConfigError for anything else."""
        match = _RANGE.fullmatch(text.strip())
        if match is None or not 1 <= (low := int(match[1])) <= (high := int(match[2] or match[1])):
            raise ConfigError(f"{text!r} is not a number of tokens; write 128, or 32:512 for a range, from 1 up")
        return cls(low, high)

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}:{self.high}"


def distribution(values: Iterable[float]) -> dict[str, float] | None:
    """Mean, percentiles (nearest rank) and extremes; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    ranks = {f"p{percent}": nearest_rank(ordered, percent) for percent in PERCENTILES}
    return {
        "count": len(ordered),
        "mean": sum(ordered) / len(ordered),
        "min": ordered[0],
        **ranks,
        "max": ordered[-1],
    }


def nearest_rank(ordered: list[float], percent: int) -> float:
    """The smallest of ``ordered`` (ascending, not empty) that at least ``percent`` % of them do not exceed."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
