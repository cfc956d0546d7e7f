"""What a step costs: seconds as a non-negative linear function of its load, learned while serving."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

FORGET = 0.9  # weight of the past per observation of the same kind: about ten steps of memory
OUTLIER = 0.5  # relative error beyond which a step is down-weighted (Huber)
RECENT = 5  # steps whose median corrects the speed; two outliers among them do no harm
RIDGE = 1e-4  # pulls towards the last fit where the observations say nothing
SWEEPS = 8  # of coordinate descent per observation, at most; it starts at the last fit
SCALE = (1.0, 1 / 256, 1 / 16384, 1 / 2**20)  # brings the features near 1


class StepLoad(NamedTuple):
    """How much work a step is, whatever the model."""

    tokens: int = 0  # positions run
    kv_tokens: int = 0  # cached positions read, summed over sequences
    pairs: int = 0  # (query, key) pairs: tokens x context

    def with_chunk(self, start: int, num_tokens: int) -> StepLoad:
        """This load plus positions ``[start, start + num_tokens)`` of one more sequence."""
        return StepLoad(
            self.tokens + num_tokens,
            self.kv_tokens + start + num_tokens,
            self.pairs + num_tokens * start + num_tokens * (num_tokens + 1) // 2,
        )


class StepCostModel:
    """Recursive least squares on (1, tokens, KV tokens, pairs), coefficients >= 0, relative errors.

    The sums of squares are kept (information form), each observation divided by its own duration so that all steps
    count alike, and the past fades by ``FORGET`` per step. Decode-only and mixed steps fade separately: an hour of
    pure decoding must not erase what a prefill token costs. A machine that turns slower or faster as a whole is
    followed at once: predictions are multiplied by the median of (observed / fitted) over the last steps.

    Where the first steps leave open what costs what, the order of the fit decides, and it must not make decodes dear:
    the automatic target is twice a decode-only step. So a first step is laid to its tokens alone, and what long prompts
    cost beyond that to pairs; as KV tokens it would be charged to each position that each decode reads.
    """

    def __init__(self) -> None:
        self._sums = {mixed: ([[0.0] * 4 for _ in range(4)], [0.0] * 4) for mixed in (False, True)}
        self._weights = [0.0] * 4
        self._recent: deque[tuple[tuple[float, ...], float]] = deque(maxlen=RECENT)
        self._speed = 1.0

    @property
    def has_learned(self) -> bool:
        """Whether any step has been observed."""
        return bool(self._recent)

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """Seconds per step, per token, per KV token and per pair, at the present speed."""
        a, b, c, d = (w * s * self._speed for w, s in zip(self._weights, SCALE, strict=True))
        return a, b, c, d

    def predict(self, load: StepLoad) -> float:
        """Expected duration in seconds; 0.0 before the first observation."""
        a, b, c, d = self.coefficients
        return a + b * load.tokens + c * load.kv_tokens + d * load.pairs

    def observe(self, load: StepLoad, duration_s: float, *, mixed: bool) -> None:
        """A step of this ``load`` took ``duration_s``. mixed: it carried prefill tokens."""
        if duration_s <= 0.0:
            return  # a runner without a clock
        x = (SCALE[0], load.tokens * SCALE[1], load.kv_tokens * SCALE[2], load.pairs * SCALE[3])
        if not self.has_learned:  # laid to the step's size: of what any step would cost, one step says nothing
            self._weights[1] = duration_s / x[1]
        error = abs(self._speed * self._fitted(x) / duration_s - 1.0)
        trust = 1.0 if error <= OUTLIER else OUTLIER / error
        squares, products = self._sums[mixed]
        scale = trust / duration_s**2
        for i in range(4):
            row, xi = squares[i], x[i] * scale
            for j in range(4):
                row[j] = row[j] * FORGET + xi * x[j]
            products[i] = products[i] * FORGET + xi * duration_s
        self._fit()
        self._recent.append((x, duration_s))
        ratios = sorted(seen / self._fitted(features) for features, seen in self._recent)
        self._speed = ratios[len(ratios) // 2]

    def _fitted(self, x: tuple[float, ...]) -> float:
        w = self._weights
        return w[0] * x[0] + w[1] * x[1] + w[2] * x[2] + w[3] * x[3]

    def _fit(self) -> None:
        """Non-negative least squares by coordinate descent, pulled towards the last fit."""
        (a, p), (b, q) = self._sums.values()
        squares = [[a[i][j] + b[i][j] for j in range(4)] for i in range(4)]
        products = [p[i] + q[i] for i in range(4)]
        weights, last = self._weights, tuple(self._weights)
        for i in range(4):
            ridge = RIDGE * squares[i][i]
            squares[i][i] += ridge
            products[i] += ridge * last[i]
        for _ in range(SWEEPS):
            moved = False
            for i in (0, 1, 3, 2):  # pairs before KV tokens: see StepCostModel
                row, weight = squares[i], weights[i]
                if row[i] > 0.0:
                    rest = row[0] * weights[0] + row[1] * weights[1] + row[2] * weights[2] + row[3] * weights[3]
                    new = max(0.0, weight + (products[i] - rest) / row[i])
                    moved = moved or abs(new - weight) > 1e-3 * weight
                    weights[i] = new
            if not moved:
                break
