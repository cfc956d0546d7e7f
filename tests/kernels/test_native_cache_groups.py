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

from machine import Answers, Machine, choices_of
from octavo.core.cache_group import CacheGroup
from octavo.core.request import Request
from octavo.kernels.native.backend import Activations

C = config(num_layers=3, layer_windows=(None, 37, 6))
ONE_GROUP = (CacheGroup(kind="full", layers=(0, 1, 2)),)


def requests() -> list[Request]:
    """Prompts that share heads, to be run one after the other or together; some with several answers."""
    rng = random.Random(3)
    stem = [rng.randrange(117) for _ in range(150)]
    made: list[Request] = []
    for number, (shared, own, choices) in enumerate([(150, 3, 1), (90, 40, 3), (150, 3, 1), (0, 70, 1), (101, 1, 2)]):
        prompt = (*stem[:shared], *(rng.randrange(117) for _ in range(own)))
        made += choices_of(number, prompt, choices, max_tokens=40, logprobs=3)
    return made


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
