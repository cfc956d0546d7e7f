"""A scheduler on a machine that exists only as a cost function: the sizer's closed loop, without a model or a clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.core.plan import SampledToken, StepResult
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.memory.kv_cache_manager import KVCacheManager
from octavo.scheduler.chunk_sizer import ChunkSizer
from octavo.scheduler.cost_model import StepLoad
from octavo.scheduler.scheduler import Scheduler

TOKEN = SampledToken(token_id=1)
# Seconds per step, per token, per KV token, per pair of the hidden machines.
MACHINES = {
    "small model, one core": (0.004, 0.00050, 2e-7, 4e-8),
    "weights dominate": (0.030, 0.00005, 1e-7, 1e-9),
    "attention dominates": (0.002, 0.00010, 2e-6, 4e-7),
    "no fixed cost": (0.0, 0.00040, 0.0, 1e-8),
}
Costs = tuple[float, float, float, float]


def seconds(costs: Costs, load: StepLoad) -> float:
    a, b, c, d = costs
    return a + b * load.tokens + c * load.kv_tokens + d * load.pairs


@dataclass
class Clock:
    """A scheduler on a machine whose speed only this class knows."""

    sizer: ChunkSizer
    costs: Costs
    noise: float = 0.03
    speed: Callable[[float], float] = lambda now: 1.0  # factor on the duration of a step
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    now: float = 0.0
    steps: list[tuple[float, float, int]] = field(default_factory=list)  # (start, duration, prefill tokens)
    decodes: list[StepLoad] = field(default_factory=list)  # of each step
    reasons: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(KVCacheManager(20_000, 16), sizer=self.sizer)

    def add(self, request_id: str, prompt_len: int, max_tokens: int) -> None:
        self.scheduler.add(
            Request(
                request_id=request_id,
                prompt_token_ids=tuple(self.rng.randrange(1000) for _ in range(prompt_len)),
                sampling=SamplingParams(),
                max_tokens=max_tokens,
                stop_token_ids=frozenset(),
                seed=0,
                arrival_s=self.now,
            )
        )

    def step(self) -> None:
        plan = self.scheduler.plan(self.now)
        load, decodes, prefill = StepLoad(), StepLoad(), 0
        for chunk in plan.chunks:
            load = load.with_chunk(chunk.start, len(chunk.token_ids))
            if chunk.reason == "decode":
                decodes = decodes.with_chunk(chunk.start, 1)
            else:
                prefill += len(chunk.token_ids)
                self.reasons.append(chunk.reason)
        noise = self.rng.uniform(1 - self.noise, 1 + self.noise)
        duration = seconds(self.costs, load) * self.speed(self.now) * noise
        tokens = tuple((TOKEN,) if chunk.draw else () for chunk in plan.chunks)
        self.scheduler.apply(plan, StepResult(step_id=plan.step_id, tokens=tokens, forward_s=duration))
        self.steps.append((self.now, duration, prefill))
        self.decodes.append(decodes)
        self.now += duration

    def prefilling(self, request_id: str) -> bool:
        seq = next(seq for seq in self.scheduler.sequences() if seq.request_id == request_id)
        return seq.num_computed < seq.prompt_len

    def run_prompt(self, request_id: str, prompt_len: int) -> list[tuple[float, float, int]]:
        """A long prompt arrives amid what runs -> the steps of its prefill."""
        first = len(self.steps)
        self.add(request_id, prompt_len, 1_000)
        while self.prefilling(request_id):
            self.step()
        return self.steps[first:]


def four_chats(sizer: ChunkSizer, costs: Costs, **more: object) -> Clock:
    clock = Clock(sizer, costs, **more)  # type: ignore[arg-type]
    for i in range(4):
        clock.add(f"chat {i}", 100, 10_000)
    for _ in range(30):
        clock.step()
    return clock


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
