"""An engine without text: a scheduler over a native backend, which shows what it decides and draws."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.cache_group import CacheGroup
from octavo.core.plan import SampledToken, StepPlan
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.model_runner import ModelRunner
from octavo.kernels.native.backend import NativeBackend
from octavo.memory.kv_cache_manager import KVCacheManager
from octavo.scheduler.chunk_sizer import FixedChunkSizer
from octavo.scheduler.scheduler import Scheduler

Answers = dict[str, list[SampledToken]]


def choices_of(number: int, prompt: Sequence[int], count: int, *, max_tokens: int, logprobs: int) -> list[Request]:
    """So many answers to one prompt, forks of the first, drawn with their own random streams."""
    return [
        Request(
            request_id=f"{number}.{choice}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(temperature=0.9, logprobs=logprobs),
            max_tokens=max_tokens,
            stop_token_ids=frozenset(),
            seed=number,
            arrival_s=0.0,
            choice_index=choice,
            fork_of=f"{number}.0" if choice else None,
        )
        for choice in range(count)
    ]


class Machine:
    """A scheduler over a backend; blocks that nobody holds are poisoned."""

    def __init__(
        self,
        made: NativeBackend,
        groups: tuple[CacheGroup, ...],
        num_blocks: tuple[int, ...],
        chunk: int,
        block_size: int = 16,
    ) -> None:
        """made: with a cache of such groups and so many blocks of each at least; chunk: prefill tokens of a step."""
        self.manager = KVCacheManager(num_blocks, block_size, groups=groups)
        self.scheduler = Scheduler(
            self.manager, sizer=FixedChunkSizer(chunk), max_num_seqs=8, max_num_batched_tokens=256
        )
        self.backend, self.runner = made, ModelRunner(made, block_size=block_size, num_groups=len(groups))
        self.answers: Answers = {}
        self.plans: list[StepPlan] = []

    def run(self) -> None:
        while self.scheduler.has_unfinished:
            plan = self.scheduler.plan(0.0)
            assert len(self.plans) < 3_000, f"nothing moves: {plan.waiting_for}"
            self.plans.append(plan)
            for event in self.scheduler.apply(plan, self.runner.execute(plan)):
                assert event.finish_reason in (None, "length"), event.stop_reason
                if event.token is not None:
                    self.answers.setdefault(event.request_id, []).append(event.token)
            self.manager.check_integrity()
            for group, blocks in enumerate(self.manager._blocks):
                for block in blocks.pool._free:
                    assert self.backend._kv is not None
                    self.backend._kv.poison(block, group)
