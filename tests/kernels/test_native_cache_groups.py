"""Layers that keep different things, from the scheduler down to the native kernels.

A model of which one layer sees everything and two see windows is run twice: with a cache in which all layers keep
everything, each request alone, and with a group for each kind of layer in pools that are too small for all requests.
There every block that nobody holds is filled with NaN after each step. All results are the same to the bit.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from native_models import config, random_llama

from octavo.core.cache_group import CacheGroup
from octavo.core.plan import SampledToken, StepPlan
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.model_runner import ModelRunner
from octavo.kernels.native.backend import Activations, NativeBackend
from octavo.memory.kv_cache_manager import KVCacheManager
from octavo.scheduler.chunk_sizer import FixedChunkSizer
from octavo.scheduler.scheduler import Scheduler

BLOCK = 16
C = config(num_layers=3, layer_windows=(None, 37, 6))
ONE_GROUP = (CacheGroup(kind="full", layers=(0, 1, 2)),)
Answers = dict[str, list[SampledToken]]


def requests() -> list[Request]:
    """Prompts that share heads, to be run one after the other or together; some with several answers."""
    rng = random.Random(3)
    stem = [rng.randrange(117) for _ in range(150)]
    made = []
    for number, (shared, own, choices) in enumerate([(150, 3, 1), (90, 40, 3), (150, 3, 1), (0, 70, 1), (101, 1, 2)]):
        prompt = (*stem[:shared], *(rng.randrange(117) for _ in range(own)))
        first = f"{number}.0"
        made += [
            Request(
                request_id=f"{number}.{choice}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(temperature=0.9, logprobs=3),
                max_tokens=40,
                stop_token_ids=frozenset(),
                seed=number,
                arrival_s=0.0,
                choice_index=choice,
                fork_of=first if choice else None,
            )
            for choice in range(choices)
        ]
    return made


class Machine:
    """A scheduler over a backend; blocks that nobody holds are poisoned."""

    def __init__(
        self, made: NativeBackend, groups: tuple[CacheGroup, ...], num_blocks: tuple[int, ...], chunk: int
    ) -> None:
        self.manager = KVCacheManager(num_blocks, BLOCK, groups=groups)
        self.scheduler = Scheduler(
            self.manager, sizer=FixedChunkSizer(chunk), max_num_seqs=8, max_num_batched_tokens=256
        )
        self.backend, self.runner = made, ModelRunner(made, block_size=BLOCK, num_groups=len(groups))
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


def answers_alone(activations: Activations, kv_dtype: str) -> Answers:
    """With everything kept, one request at a time, nothing shared."""
    made = random_llama(C, "Q4_1", num_blocks=64, activations=activations, kv_dtype=kv_dtype)
    answers = {}
    for request in requests():
        machine = Machine(made, ONE_GROUP, (64,), 256)
        machine.scheduler.add(replace(request, fork_of=None))
        machine.run()
        answers |= machine.answers
    made.close()
    return answers


@pytest.mark.parametrize(("activations", "kv_dtype"), [("int8", "bfloat16"), ("bf16", "bfloat16"), ("int8", "float32")])
@pytest.mark.parametrize("together", [False, True], ids=["one after the other", "together"])
def test_groups_of_layers_change_no_bit(activations: Activations, kv_dtype: str, together: bool) -> None:
    groups = C.cache_groups
    assert [group.name for group in groups] == ["full", "window 37", "window 6"]
    made = random_llama(C, "Q4_1", num_blocks=64, grouped=True, activations=activations, kv_dtype=kv_dtype)
    machine = Machine(made, groups, (17, 12, 9) if together else (30, 16, 11), 50)
    for request in requests():
        machine.scheduler.add(request)
        if not together:
            machine.run()
    machine.run()
    assert machine.answers == answers_alone(activations, kv_dtype)
    admitted = [admission for plan in machine.plans for admission in plan.admitted]
    assert any(admission.miss_reason == "forked" for admission in admitted) == together
    assert sum(admission.cached_tokens for admission in admitted) > 300
    assert any(plan.preempted for plan in machine.plans) == together
    held = {
        group.name: group.num_blocks - group.free_blocks - group.cached_blocks
        for group in machine.manager.stats().groups
    }
    assert held == {"full": 0, "window 37": 0, "window 6": 0}
    made.close()


def test_a_layer_that_sees_more_than_its_group_keeps_is_refused() -> None:
    made = random_llama(C, "Q4_1")
    layout = random_llama(replace(C, layer_windows=(None, 37, 5)), "Q4_1", grouped=True)
    made._kv = layout._kv
    machine = Machine(made, C.cache_groups, (30, 16, 11), 50)
    machine.scheduler.add(requests()[0])
    with pytest.raises(ValueError, match="layer 2 attends to more than its group of the KV cache keeps"):
        machine.run()
