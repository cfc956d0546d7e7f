"""The sizer's closed loop, on a synthetic clock with hidden costs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_clock import MACHINES, Clock, Costs, four_chats, percentile, seconds

from octavo.scheduler.chunk_sizer import (
    FIRST_STEP_TOKENS,
    MAX_STEP_S,
    AdaptiveChunkSizer,
    FixedChunkSizer,
    StepBudget,
    StepSituation,
)
from octavo.scheduler.cost_model import StepCostModel, StepLoad


def optimal_prefill_s(costs: Costs, context: int, prompt_len: int, target_s: float, speed: float = 1.0) -> float:
    """Prefill time of one prompt beside four decodes for who knows the costs: the largest chunk in time, each step."""
    total, start = 0.0, 0
    costs = tuple(c * speed for c in costs)  # type: ignore[assignment]
    while start < prompt_len:
        decodes = StepLoad(4, 4 * context, 4 * context)
        n = 1
        while n < prompt_len - start and n < 2044 and seconds(costs, decodes.with_chunk(start, n + 1)) <= target_s:
            n += 1
        n = min(max(n, 16), prompt_len - start)
        total += seconds(costs, decodes.with_chunk(start, n))
        start += n
    return total


@pytest.mark.parametrize("machine", MACHINES)
def test_a_long_prompt_keeps_the_step_under_the_target_and_wastes_little_of_it(machine: str) -> None:
    costs, target_s = MACHINES[machine], 0.080
    clock = four_chats(AdaptiveChunkSizer(16, target_s), costs)
    steps = clock.run_prompt("long", 4_000)
    assert percentile([duration for _, duration, _ in steps], 0.99) <= 1.2 * target_s
    best = optimal_prefill_s(costs, 140, 4_000, target_s)
    assert sum(duration for _, duration, _ in steps) <= 1.3 * best
    assert "target_itl" in clock.reasons


@pytest.mark.parametrize("machine", MACHINES)
def test_a_sudden_threefold_slowdown_is_learned_within_20_steps(machine: str) -> None:
    costs, target_s = MACHINES[machine], 0.120
    clock = four_chats(AdaptiveChunkSizer(16, target_s), costs)
    clock.add("long", 24_000, 10)
    for _ in range(8):
        clock.step()
    assert clock.prefilling("long")
    slow_from = clock.now
    clock.speed = lambda now: 3.0 if now >= slow_from else 1.0
    first = len(clock.steps)
    while clock.prefilling("long") and len(clock.steps) < first + 100:
        clock.step()
    after = [duration for _, duration, _ in clock.steps[first + 20 :]]
    assert after
    assert percentile(after, 0.99) <= 1.2 * target_s
    late = [duration for _, duration, _ in clock.steps[first:] if duration > 1.2 * target_s]
    assert len(late) <= 8, "it learns in a few steps, not in 20"


@pytest.mark.parametrize("machine", MACHINES)
def test_long_decoding_does_not_erase_what_a_prefill_token_costs(machine: str) -> None:
    costs, target_s = MACHINES[machine], 0.080
    clock = four_chats(AdaptiveChunkSizer(16, target_s), costs)
    clock.run_prompt("first", 2_000)
    clock.scheduler.finish("first", "abort")
    for _ in range(1_000):
        clock.step()
    slow_from = clock.now  # the machine slows down while nobody looks at prefill
    clock.speed = lambda now: 1.5 if now >= slow_from else 1.0
    for _ in range(20):
        clock.step()
    steps = clock.run_prompt("second", 6_000)
    assert max(duration for _, duration, _ in steps) <= 1.6 * target_s
    assert max(duration for _, duration, n in steps[4:] if n > 16) <= 1.2 * target_s
    assert sum(duration for _, duration, _ in steps) <= 1.4 * optimal_prefill_s(costs, 1_200, 6_000, target_s, 1.5)


def test_single_slow_steps_hardly_change_the_chunks() -> None:
    costs, target_s = MACHINES["small model, one core"], 0.080
    clock = four_chats(AdaptiveChunkSizer(16, target_s), costs)
    clock.speed = lambda now: 6.0 if len(clock.steps) % 15 == 0 else 1.0
    steps = clock.run_prompt("long", 8_000)
    usual = [duration for _, duration, _ in steps[:-1] if duration < 2 * target_s]
    assert len(steps) - 1 - len(usual) >= 4
    assert percentile(usual, 0.1) >= 0.9 * target_s
    assert percentile(usual, 0.99) <= 1.1 * target_s


def test_without_a_target_a_step_may_take_twice_a_decode_only_step() -> None:
    costs = MACHINES["weights dominate"]
    clock = four_chats(AdaptiveChunkSizer(16, None), costs)
    alone = clock.steps[-1][1]
    steps = clock.run_prompt("long", 8_000)
    durations = [duration for _, duration, _ in steps[:-1]]
    assert percentile(durations, 0.5) == pytest.approx(2 * alone, rel=0.1)


def situation(**changes: object) -> StepSituation:
    facts: dict[str, object] = {
        "decodes": StepLoad(4, 400, 400),
        "hard_limit": 2044,
        "spare_blocks": 10_000,
        "num_waiting": 0,
        "max_num_seqs": 64,
        "wait": 0.0,
    }
    return StepSituation(**{**facts, **changes})  # type: ignore[arg-type]


def trained_sizer() -> AdaptiveChunkSizer:
    clock = four_chats(AdaptiveChunkSizer(16, 0.080), MACHINES["small model, one core"], noise=0.0)
    clock.run_prompt("long", 4_000)
    assert isinstance(clock.sizer, AdaptiveChunkSizer)
    return clock.sizer


def test_each_choice_carries_its_reason() -> None:
    sizer = trained_sizer()
    usual, why = sizer.begin(situation()).allow(0, 4_000)
    assert why == "target_itl"
    assert 100 < usual < 200  # (80 - 4) ms at 0.5 ms per token
    assert sizer.begin(situation()).allow(0, 50) == (50, "last piece")
    assert sizer.begin(situation(decodes=StepLoad(), hard_limit=1024)).allow(0, 4_000) == (1024, "no decodes")
    stretched, why = sizer.begin(situation(wait=1.2)).allow(0, 4_000)
    assert why == "max_prefill_wait_s"
    assert stretched == pytest.approx(usual + 96, abs=10)  # 0.6 of 80 ms more
    assert sizer.begin(situation(spare_blocks=2)).allow(0, 4_000) == (32, "memory")
    assert sizer.begin(situation(spare_blocks=0)).allow(0, 4_000) == (16, "memory")
    assert sizer.begin(situation(hard_limit=8)).allow(0, 4_000) == (8, "budget")
    crowded, why = sizer.begin(situation(num_waiting=256)).allow(0, 4_000)
    assert why == "queue depth"
    assert 0.4 * usual < crowded < 0.6 * usual
    busy = situation(decodes=StepLoad(64, 200_000_000, 200_000_000))
    assert sizer.begin(busy).allow(0, 4_000) == (16, "floor")
    assert AdaptiveChunkSizer(16, 0.080).begin(situation()).allow(0, 4_000) == (64, "ramp")


def test_the_floor_is_one_block_per_step_not_per_sequence() -> None:
    budget = trained_sizer().begin(situation(decodes=StepLoad(64, 200_000_000, 200_000_000)))
    assert budget.allow(0, 10) == (10, "last piece")
    budget.spend(0, 10)
    assert budget.allow(0, 100) == (6, "floor")
    budget.spend(0, 6)
    assert budget.allow(0, 100)[0] == 0


def test_a_step_of_several_prefills_is_predicted_as_it_will_run() -> None:
    sizer, costs = trained_sizer(), MACHINES["small model, one core"]
    budget = sizer.begin(situation())
    load = situation().decodes
    for start, wanted in ((0, 20), (3_000, 30), (500, 4_000)):
        num_tokens, _ = budget.allow(start, wanted)
        budget.spend(start, num_tokens)
        load = load.with_chunk(start, num_tokens)
    facts = budget.facts()
    assert facts.target_s == 0.080
    assert facts.predicted_s == pytest.approx(0.080, rel=0.02)
    assert seconds(costs, load) == pytest.approx(0.080, rel=0.05)


def test_fixed_gives_the_same_budget_whatever_happens() -> None:
    sizer = FixedChunkSizer(512)
    for changes in ({}, {"wait": 9.0}, {"spare_blocks": 0}, {"decodes": StepLoad()}):
        assert sizer.begin(situation(**changes)).allow(0, 4_000) == (512, "budget")
    assert sizer.begin(situation(hard_limit=100)).allow(0, 4_000) == (100, "budget")


def test_adaptive_keeps_the_tail_at_least_three_times_shorter_than_fixed() -> None:
    costs = MACHINES["small model, one core"]
    worst = {}
    for name, sizer in (("adaptive", AdaptiveChunkSizer(16, 0.080)), ("fixed", FixedChunkSizer(512))):
        steps = four_chats(sizer, costs).run_prompt("long", 4_000)
        worst[name] = percentile([duration for _, duration, _ in steps], 0.99)
    assert 3 * worst["adaptive"] <= worst["fixed"]


def test_coefficients_are_never_negative_and_the_fit_is_exact_without_noise() -> None:
    model, rng, costs = StepCostModel(), random.Random(3), MACHINES["small model, one core"]
    for _ in range(200):
        load = StepLoad()
        for _ in range(rng.randint(1, 8)):
            load = load.with_chunk(rng.randrange(3_000), rng.choice((1, 1, 1, rng.randrange(1, 500))))
        model.observe(load, seconds(costs, load), mixed=load.tokens > 8)
        assert min(model.coefficients) >= 0.0
    load = StepLoad(100, 10_000, 200_000)
    assert model.predict(load) == pytest.approx(seconds(costs, load), rel=0.02)


def test_a_runner_without_a_clock_teaches_nothing() -> None:
    model = StepCostModel()
    model.observe(StepLoad(10, 10, 55), 0.0, mixed=True)
    assert model.predict(StepLoad(1_000, 1_000, 500_000)) == 0.0


def test_a_step_without_decodes_is_bounded_in_time_too() -> None:
    """Aborts, arrivals and whoever looks at the engine wait for its end."""
    idle = situation(decodes=StepLoad(), hard_limit=1 << 20)
    sizer = trained_sizer()
    tokens, why = sizer.begin(idle).allow(0, 1 << 20)
    assert why == "max_step"
    assert 0.5 * MAX_STEP_S < sizer.cost.predict(StepLoad().with_chunk(0, tokens)) <= MAX_STEP_S
    assert AdaptiveChunkSizer(16, None).begin(idle).allow(0, 1 << 20) == (FIRST_STEP_TOKENS, "ramp")


def far_trained_sizer() -> AdaptiveChunkSizer:
    """One that has also seen a step as long as any here."""
    sizer, load = trained_sizer(), StepLoad().with_chunk(0, 2_000)
    sizer.observe(load, 2_000, seconds(MACHINES["small model, one core"], load))
    return sizer


def test_a_wait_stretches_the_target_in_proportion_up_to_four_times() -> None:
    sizer = far_trained_sizer()
    targets = [sizer.begin(situation(wait=wait)).facts().target_s for wait in (0.0, 1.0, 1.5, 1.9, 2.0, 2.1, 1_000.0)]
    assert targets == pytest.approx([0.080, 0.080, 0.200, 0.296, 0.320, 0.320, 0.320])
    tokens = [sizer.begin(situation(wait=wait)).facts().tokens for wait in (0.5, 1.0, 1.0001, 1.5, 2.0, 9.0)]
    assert tokens[0] == tokens[1] == pytest.approx(tokens[2], abs=1)
    assert tokens[2] < tokens[3] < tokens[4] == tokens[5]


def test_no_wait_stretches_a_step_beyond_a_second_and_none_shrinks_a_target_that_is_longer() -> None:
    for target_s, stretched_s in ((0.200, 0.800), (0.251, MAX_STEP_S), (0.999, MAX_STEP_S), (1.0, 1.0), (3.0, 3.0)):
        facts = AdaptiveChunkSizer(16, target_s).begin(situation(wait=50.0)).facts()
        assert facts.target_s == pytest.approx(stretched_s)


def test_a_deep_queue_takes_nothing_from_what_a_wait_adds() -> None:
    sizer = far_trained_sizer()
    usual, crowded = (sizer.begin(situation(num_waiting=n)).facts().tokens for n in (0, 256))
    late, late_and_crowded = (sizer.begin(situation(num_waiting=n, wait=2.0)).facts().tokens for n in (0, 256))
    assert late - late_and_crowded == pytest.approx(usual - crowded, abs=8)


def test_the_first_steps_of_all_are_not_trusted_to_be_free() -> None:
    """One step of 512 tokens has been seen. That it was the tokens that took the time is the careful reading."""
    sizer = AdaptiveChunkSizer(16, 0.080)
    load = StepLoad().with_chunk(0, 512)
    sizer.observe(load, 512, 1.0)
    assert sizer.cost.predict(load) == pytest.approx(1.0, rel=0.01)
    assert sizer.cost.predict(StepLoad(1, 512, 512)) < 0.010
    tokens, why = sizer.begin(situation(decodes=StepLoad(1, 512, 512))).allow(0, 4_000)
    assert (tokens, why) == (pytest.approx(40, abs=4), "target_itl")


def test_what_a_long_prompt_costs_is_not_charged_to_each_position_that_decodes_read() -> None:
    """The automatic target is twice a decode-only step: decodes that look dear make every step longer."""
    costs: Costs = (0.0075, 0.0018, 1e-6, 1e-7)
    clock = Clock(AdaptiveChunkSizer(16, None), costs)
    clock.add("warm-up", 1_024, 32)
    while clock.scheduler.has_unfinished:
        clock.step()
    for i in range(16):
        clock.add(f"{i}", 1_024, 128)
    assert isinstance(clock.sizer, AdaptiveChunkSizer)
    ratios = []
    while clock.scheduler.has_unfinished:
        clock.step()
        ratios.append(clock.sizer.cost.predict(clock.decodes[-1]) / seconds(costs, clock.decodes[-1]))
    assert percentile(ratios, 0.98) <= 1.2


@given(st.integers(0, 300), st.integers(1, 60))
def test_a_load_counts_every_position_that_is_read_and_every_pair(start: int, num_tokens: int) -> None:
    end = start + num_tokens
    counted = StepLoad(2 + num_tokens, 3 + end, 5 + sum(position + 1 for position in range(start, end)))
    assert StepLoad(2, 3, 5).with_chunk(start, num_tokens) == counted
    assert StepLoad() == StepLoad(0, 0, 0)


def test_a_budget_says_what_was_allowed_whatever_of_it_has_been_spent() -> None:
    budget = StepBudget(100, "budget")
    budget.spend(0, 30)
    assert (budget.facts().tokens, budget.facts().reason) == (100, "budget")
    assert budget.allow(0, 70) == (70, "last piece")
    assert budget.allow(0, 71) == (70, "budget")


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 8_000), st.floats(0.0, 0.25))
def test_the_largest_chunk_in_time_is_allowed_and_none_larger(start: int, queued: float) -> None:
    sizer = trained_sizer()
    crowd = situation(num_waiting=int(queued * 4 * 64))
    decodes = crowd.decodes
    num_tokens, why = sizer.begin(crowd).allow(start, 100_000)
    usual_s = sizer.target_s(decodes)
    limit_s = usual_s - crowd.num_waiting / 256 * 0.5 * (usual_s - sizer.cost.predict(decodes))
    if why in ("target_itl", "queue depth"):
        assert sizer.cost.predict(decodes.with_chunk(start, num_tokens)) <= limit_s * (1 + 1e-9)
        assert sizer.cost.predict(decodes.with_chunk(start, num_tokens + 1)) > limit_s * (1 - 1e-9)
    else:
        assert why in ("floor", "ramp")


def test_no_chunk_goes_far_beyond_the_pairs_that_have_been_seen() -> None:
    sizer = AdaptiveChunkSizer(16, 1.0)
    sizer.observe(StepLoad(10, 100, 3_000), 10_000, 1e-6)  # a machine that seems endlessly fast
    asked = situation(decodes=StepLoad(1, 50, 50), hard_limit=100_000)
    for start in (0, 7, 500):
        num_tokens, why = sizer.begin(asked).allow(start, 100_000)
        assert why == "ramp"
        most = 4 * max(3_000, 16 * 16 * 16)
        assert asked.decodes.with_chunk(start, num_tokens).pairs <= most
        assert asked.decodes.with_chunk(start, num_tokens + 1).pairs > most
