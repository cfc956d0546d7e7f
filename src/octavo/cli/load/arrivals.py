"""When requests arrive: pure functions of a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Either ``concurrency`` clients that each ask again once they have their answer, or requests at ``rate``.

    burstiness: shape of the gamma distribution of the gaps, whose mean is 1 / rate. 1 is a Poisson process; with less,
    requests come in bursts, with more, evenly.
    """

    concurrency: int | None = None
    rate: float | None = None  # requests per second
    burstiness: float = 1.0

    def times_s(self, seed: int) -> Iterator[float]:
        """Arrival times from 0 on, without end. Only with a rate."""
        assert self.rate is not None
        rng = random.Random(f"{seed}/arrivals")
        now_s = 0.0
        while True:
            yield now_s
            now_s += rng.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))

    def __str__(self) -> str:
        if self.rate is None:
            return f"{self.concurrency} at once"
        gaps = "" if self.burstiness == 1 else f", burstiness {self.burstiness:g}"
        return f"{self.rate:g} requests/s{gaps}"
