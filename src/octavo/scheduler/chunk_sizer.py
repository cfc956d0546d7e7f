"""How many prefill tokens a step may carry: a fixed number, or what keeps the predicted step under a target."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from octavo.core.config import EngineConfig
from octavo.core.plan import BudgetFacts, ChunkReason
from octavo.scheduler.cost_model import StepCostModel, StepLoad

UNLIMITED = 1 << 40  # tokens

#: Longest step while nobody decodes, and the most that a wait stretches the target to. Aborts, arrivals and whoever
#: looks at the engine wait for a step to end: with no bound, 2,048 tokens took 8 s on a slow machine. Past a few
#: hundred tokens, more are hardly faster per token.
MAX_STEP_S = 1.0
#: How many times the target may last once a prefill has waited for twice max_prefill_wait_s.
MAX_STRETCH = 4.0
#: Prefill tokens of a step about whose length nothing is known yet.
FIRST_STEP_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSituation:
    """What a sizer knows when it sets the budget of a step."""

    decodes: StepLoad  # the one-token chunks, placed already
    hard_limit: int  # tokens that the step can still carry
    spare_blocks: int  # blocks that prefill can take without making a decode run dry in this step or the next
    num_waiting: int
    max_num_seqs: int
    wait: float  # the longest of a prefill that nothing but the budget keeps from running, in max_prefill_wait_s


class StepBudget:
    """The prefill tokens of one step, handed out piece by piece."""

    def __init__(self, tokens: int, reason: ChunkReason) -> None:
        self._left = tokens
        self._reason = reason
        self.spent = 0

    def allow(self, start: int, wanted: int) -> tuple[int, ChunkReason]:
        """How many tokens from position ``start`` on may run, and what bounds them. Changes nothing."""
        return (wanted, "last piece") if wanted <= self._left else (self._left, self._reason)

    def spend(self, start: int, num_tokens: int) -> None:
        """They run."""
        self._left -= num_tokens
        self.spent += num_tokens

    def facts(self) -> BudgetFacts:
        """What was allowed in all, and why."""
        return BudgetFacts(tokens=self.spent + self._left, reason=self._reason)


class ChunkSizer(ABC):
    """Sets the prefill budget of each step."""

    @abstractmethod
    def begin(self, situation: StepSituation) -> StepBudget:
        """The budget of the step being planned."""

    def observe(self, load: StepLoad, prefill_tokens: int, duration_s: float) -> None:  # noqa: B027
        """What the step weighed and how long it took."""


class FixedChunkSizer(ChunkSizer):
    """The same budget in every step: the baseline to beat."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size

    def begin(self, situation: StepSituation) -> StepBudget:
        return StepBudget(min(self._chunk_size, situation.hard_limit), "budget")


class AdaptiveChunkSizer(ChunkSizer):
    """The largest prefill whose predicted step stays under the target while anyone decodes. Closed loop.

    A prefill that waits for longer than max_prefill_wait_s stretches the target, up to ``MAX_STRETCH`` times at twice
    that wait.

    The costs are learned from every step (``StepCostModel``). A chunk may have at most twice the tokens and four times
    the (query, key) pairs of what has been seen, so that a fit with little to go on is never trusted far beyond it
    ("ramp"). One block per step always runs ("floor").
    """

    def __init__(self, block_size: int, target_itl_s: float | None) -> None:
        """target_itl_s: None means twice the fitted decode-only step, at least 50 ms."""
        self._block_size = block_size
        self._target_itl_s = target_itl_s
        self._most_tokens = 2 * block_size  # prefill tokens of the largest step seen
        self.most_pairs = 16 * block_size**2
        self.cost = StepCostModel()

    def begin(self, situation: StepSituation) -> StepBudget:
        reason: ChunkReason
        limit, reason = situation.hard_limit, "budget"
        memory = situation.spare_blocks * self._block_size
        if memory < limit:
            limit, reason = memory, "memory"
        floor = min(self._block_size, situation.hard_limit)
        if situation.decodes.tokens == 0:  # nobody is kept waiting
            if not self.cost.has_learned and limit > FIRST_STEP_TOKENS:
                limit, reason = FIRST_STEP_TOKENS, "ramp"
            elif reason == "budget":
                reason = "no decodes"
            bounds = TimeBounds(target_s=MAX_STEP_S, limit_s=MAX_STEP_S, reason="max_step", most_pairs=UNLIMITED)
            return _TargetBudget(limit, reason, floor, situation, self, bounds)
        ramp = 2 * self._most_tokens
        if ramp < limit:
            limit, reason = ramp, "ramp"
        return _TargetBudget(limit, reason, floor, situation, self, self._bounds(situation))

    def observe(self, load: StepLoad, prefill_tokens: int, duration_s: float) -> None:
        self._most_tokens = max(self._most_tokens, prefill_tokens)
        self.most_pairs = max(self.most_pairs, load.pairs)
        self.cost.observe(load, duration_s, mixed=prefill_tokens > 0)

    def _bounds(self, situation: StepSituation) -> TimeBounds:
        """How long the step may take beside the decodes, and how far the fit is trusted."""
        usual_s, base = self.target_s(situation.decodes), self.cost.predict(situation.decodes)
        # A deep queue is served by finishing what runs, which frees sequences: up to half of the room goes to decodes.
        # (Not of what a wait adds: only the budget can be what a prefill waits for, so sequences are not short.)
        crowding = min(situation.num_waiting / (4 * situation.max_num_seqs), 1.0)
        reason: ChunkReason
        target_s, reason = usual_s, "queue depth" if crowding > 0.25 else "target_itl"
        if situation.wait > 1.0 and usual_s < MAX_STEP_S:
            stretch = 1.0 + (MAX_STRETCH - 1.0) * min(situation.wait - 1.0, 1.0)
            target_s, reason = min(stretch * usual_s, MAX_STEP_S), "max_prefill_wait_s"
        return TimeBounds(
            target_s=target_s,
            limit_s=target_s - crowding * 0.5 * max(usual_s - base, 0.0),
            reason=reason,
            most_pairs=4 * self.most_pairs,
        )

    def target_s(self, decodes: StepLoad) -> float:
        """Longest step while ``decodes`` are waiting for their tokens and no prefill for too long."""
        if self._target_itl_s is not None:
            return self._target_itl_s
        return max(0.050, 2.0 * self.cost.predict(decodes))


def make_sizer(config: EngineConfig) -> ChunkSizer:
    """The sizer that ``config`` wishes for."""
    if config.chunking == "fixed":
        return FixedChunkSizer(config.chunk_size)
    target_itl_s = None if config.target_itl_ms is None else config.target_itl_ms / 1000.0
    return AdaptiveChunkSizer(config.block_size, target_itl_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBounds:
    """What bounds a step besides its number of tokens."""

    target_s: float  # reported
    limit_s: float  # predicted length that the step must stay under
    reason: ChunkReason  # of a chunk that this length bounds
    most_pairs: int  # (query, key) pairs up to which the prediction is trusted


class _TargetBudget(StepBudget):
    """Hands out tokens while the predicted step stays under a limit."""

    def __init__(
        self,
        tokens: int,
        reason: ChunkReason,
        floor: int,
        situation: StepSituation,
        sizer: AdaptiveChunkSizer,
        bounds: TimeBounds,
    ) -> None:
        super().__init__(max(tokens, floor), reason)
        self._cost = sizer.cost
        self._bounds = bounds
        self._load = situation.decodes
        self._floor = floor

    def allow(self, start: int, wanted: int) -> tuple[int, ChunkReason]:
        tokens, reason = super().allow(start, wanted)
        in_time = self._tokens_in_time(start)
        if in_time < tokens:
            tokens, reason = in_time, self._bounds.reason
        known = _root(start + 0.5, 0.5, self._bounds.most_pairs - self._load.pairs)
        if known < tokens:
            tokens, reason = known, "ramp"
        least = min(self._floor - self.spent, wanted)
        if tokens < least:
            tokens, reason = least, "last piece" if least == wanted else "floor"
        return tokens, reason

    def spend(self, start: int, num_tokens: int) -> None:
        super().spend(start, num_tokens)
        self._load = self._load.with_chunk(start, num_tokens)

    def facts(self) -> BudgetFacts:
        more, reason = self.allow(0, self._left)
        return BudgetFacts(
            tokens=self.spent + more,
            reason=self._reason if reason == "last piece" else reason,
            predicted_s=self._cost.predict(self._load),
            target_s=self._bounds.target_s,
        )

    def _tokens_in_time(self, start: int) -> int:
        """The largest n for which load + [start, start + n) is predicted to stay under the limit.

        seconds(n) = predict(load) + kv * start + n * (token + kv + pair * (start + 1/2)) + n^2 * pair / 2
        """
        _, token, kv, pair = self._cost.coefficients
        room = self._bounds.limit_s - self._cost.predict(self._load) - kv * start
        return _root(token + kv + pair * (start + 0.5), pair / 2, room)


def _root(linear: float, square: float, room: float) -> int:
    """The largest whole n >= 0 with ``linear * n + square * n^2 <= room``, for coefficients >= 0."""
    if room <= 0.0:
        return 0
    if linear + square <= 0.0:
        return UNLIMITED
    # the stable form of the quadratic's positive root; square may be 0
    return int(2.0 * room / (linear + math.sqrt(linear * linear + 4.0 * square * room)))
