"""More arrives than can run: how long a token waits, how long a prompt waits, on machines with hidden costs.

Bounds, not comparisons: what docs/scheduling.md promises has to hold on every machine, whatever it is good at.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
from model_free import SIZE, Driver, request
from synthetic_clock import Clock, Costs, percentile, seconds

from octavo.scheduler.chunk_sizer import (
    MAX_STEP_S,
    AdaptiveChunkSizer,
    ChunkSizer,
    FixedChunkSizer,
    StepBudget,
    StepSituation,
)
from octavo.scheduler.cost_model import StepLoad
from octavo.scheduler.policy import PriorityPolicy

BLOCK = 16
WAIT_S = 5.0  # max_prefill_wait_s, the default


@dataclass
class Burst:
    """A random machine, and streams that reach it all at once."""

    seed: int

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)

        def between(low: float, high: float) -> float:
            return math.exp(rng.uniform(math.log(low), math.log(high)))

        token = between(0.0002, 0.004)
        self.costs: Costs = (between(0.001, 0.03), token, token * between(1e-5, 1e-3), token * between(1e-6, 1e-4))
        self.target_s = rng.choice((None, None, between(0.02, 0.3)))
        self.prompts = [int(between(50, 2_000)) for _ in range(rng.choice((4, 12, 24)))]
        self.answer = rng.randrange(20, 80)
        sizer = AdaptiveChunkSizer(BLOCK, self.target_s)
        self.clock = Clock(sizer, self.costs, rng=rng)
        self.first_token: list[float] = []  # by stream
        self.steps: list[tuple[float, float]] = []  # (duration, its bound), of those that kept a decode waiting

    def run(self) -> None:
        clock = self.clock
        for i, length in enumerate(self.prompts):
            clock.add(f"{i}", length, self.answer)
        waiting = {f"{i}" for i in range(len(self.prompts))}
        ttft = {}
        while clock.scheduler.has_unfinished:
            clock.step()
            views = {view.request_id: view for view in clock.scheduler.sequences()}
            started = {name for name in waiting if name not in views or views[name].num_tokens > views[name].prompt_len}
            ttft |= dict.fromkeys(started, clock.now)
            waiting -= started
            if clock.decodes[-1].tokens:
                self.steps.append((clock.steps[-1][1], self.longest_step(clock.decodes[-1])))
        self.first_token = [ttft[f"{i}"] for i in range(len(self.prompts))]

    def target(self, decodes: StepLoad) -> float:
        return self.target_s or max(0.050, 2 * seconds(self.costs, decodes))

    def longest_step(self, decodes: StepLoad) -> float:
        """Four targets, or a second where that is less; a block in any case, at the depth of the longest prompt."""
        target = self.target(decodes)
        floor = seconds(self.costs, decodes.with_chunk(max(self.prompts), BLOCK))
        return max(target, min(4 * target, MAX_STEP_S), floor)

    def slowest_prefill_s(self) -> float:
        """All prompts at the rate that is promised beside the most decodes that there can be.

        A step that is held to L seconds beside decodes of D gives L - D to prefill; where that is less than a block,
        it runs a block.
        """
        longest = max(self.prompts) + self.answer
        count = len(self.prompts)
        decodes = StepLoad(count, count * longest, count * longest)
        base = seconds(self.costs, decodes)
        target = self.target(decodes)
        room = target - base - 0.5 * count / (4 * 64) * (target - base)
        prefill_s = sum(seconds(self.costs, StepLoad().with_chunk(0, n)) for n in self.prompts)
        share = room / (base + room) if room > 0 else 0.0
        blocks = sum(-(-n // BLOCK) for n in self.prompts)
        by_blocks = blocks * seconds(self.costs, decodes.with_chunk(longest, BLOCK))
        return min(prefill_s / share, by_blocks) if share else by_blocks


def check_bursts(seeds: range) -> None:
    worst, num_overloaded = [], 0
    for seed in seeds:
        burst = Burst(seed)
        burst.run()
        worst.append(percentile([duration / bound for duration, bound in burst.steps], 0.99))
        waited, bound = max(burst.first_token), burst.slowest_prefill_s()
        assert waited <= 1.1 * bound + 1.0, f"seed {seed}: the last first token after {waited:.1f} s, bound {bound:.1f}"
        num_overloaded += waited > WAIT_S
    # The P99 of a step with decodes, by its bound. 5 of the first 312 machines exceed 1.2: their fit takes decodes for
    # dearer than they are, and nothing in a burst, with prefill in every step, tells it otherwise.
    assert max(worst) <= 1.35
    assert sum(w > 1.2 for w in worst) <= 0.025 * len(worst)
    assert num_overloaded > len(seeds) // 4, "too few of these machines are overloaded"


def test_under_overload_no_token_waits_four_targets_and_no_prompt_without_end() -> None:
    check_bursts(range(12))


@pytest.mark.slow
def test_the_same_holds_on_hundred_and_fifty_more_machines() -> None:
    check_bursts(range(12, 162))


# What counts as a wait


class Recorder(FixedChunkSizer):
    """Keeps the wait that each step was planned with."""

    def __init__(self, chunk_size: int) -> None:
        super().__init__(chunk_size)
        self.waits: list[float] = []

    def begin(self, situation: StepSituation) -> StepBudget:
        self.waits.append(situation.wait)
        return super().begin(situation)


def test_whoever_is_next_waits_since_it_arrived() -> None:
    sizer = Recorder(8)
    driver = Driver(num_blocks=400, sizer=sizer, max_prefill_wait_s=0.5)
    driver.add(request("chat", 3, 300))
    driver.step()
    driver.add(request("first", 400, 2, arrival_s=driver.now), request("next", 200, 2, arrival_s=driver.now))
    arrival_s = driver.now
    for _ in range(40):
        assert driver.step().waiting_for == {"next": "budget"}
    assert sizer.waits[-1] == pytest.approx((driver.plans[-1].step_id * 0.01 - 0.01 - arrival_s) / 0.5)
    assert sizer.waits[-1] == pytest.approx(0.78)


def test_a_wait_for_a_free_sequence_is_no_wait_for_the_budget() -> None:
    sizer = Recorder(8)
    driver = Driver(num_blocks=400, sizer=sizer, max_num_seqs=2, max_prefill_wait_s=0.5)
    driver.add(request("chat", 3, 40), request("long", 480, 2), request("next", 200, 2))
    while driver.step().waiting_for == {"next": "max_num_seqs"}:
        pass
    assert driver.plans[-1].waiting_for == {"next": "budget"}
    assert driver.now >= 0.4
    driver.step()
    assert sizer.waits[-1] <= 0.05, "it has waited for the budget for one step or two"
    for _ in range(10):
        assert driver.step().waiting_for == {"next": "budget"}
    assert sizer.waits[-1] == pytest.approx(0.24, abs=0.03)


def test_a_preempted_sequence_has_not_waited_while_it_ran() -> None:
    """It ran for long, gave way, and another's blocks come back at once: now only the budget holds it up."""
    sizer = Recorder(2)
    driver = Driver(num_blocks=428, sizer=sizer, policy=PriorityPolicy(10.0), max_prefill_wait_s=0.1)
    driver.add(request("old", 2, 900), request("ends", 2, 900), request("late", 2, 400, priority=5))
    while driver.computed("late") < 100:
        driver.step()
    driver.add(request("urgent", 600, 2, arrival_s=driver.now))  # prefills, two tokens at a time, from here on
    while not driver.plans[-1].preempted:
        driver.step()
    assert driver.plans[-1].preempted == ("late",)
    driver.scheduler.finish("ends", "abort")
    assert driver.step().waiting_for == {"late": "budget"}
    driver.step()
    assert sizer.waits[-1] <= 0.3, "two steps of 0.01 s since it gave way, in units of 0.1 s"


def test_a_wait_for_the_parent_of_a_fork_is_no_wait_for_the_budget() -> None:
    sizer = Recorder(8)
    driver = Driver(num_blocks=400, sizer=sizer, max_prefill_wait_s=0.5)
    driver.add(request("n0", list(range(420)), 50), request("n1", list(range(420)), 2, fork_of="n0"))
    driver.add(request("long", 200, 2))
    while driver.step().waiting_for.get("n1") == "fork_parent":
        pass
    assert driver.plans[-1].waiting_for == {"n1": "budget"}
    driver.step()
    assert driver.now >= 0.5
    assert sizer.waits[-1] <= 0.05


def test_a_waiting_request_that_ended_stretches_nothing() -> None:
    sizer = Recorder(4)
    driver = Driver(num_blocks=400, sizer=sizer, max_prefill_wait_s=0.5)
    driver.add(request("chat", 3, 300))
    driver.step()
    driver.add(request("first", 40, 2, arrival_s=driver.now), request("gone", 200, 2, arrival_s=driver.now))
    assert driver.step().waiting_for == {"gone": "budget"}
    driver.scheduler.finish("gone", "abort")
    driver.scheduler.finish("first", "abort")
    for _ in range(100):
        driver.step()
    driver.add(request("new", 200, 2, arrival_s=driver.now))
    driver.step()
    assert sizer.waits[-1] == 0.0


# The least that an admitted prefill gets


class Crumbs(ChunkSizer):
    """A block for each prefill in the first step, and one block for all of them in every other."""

    def __init__(self) -> None:
        self.started = False

    def begin(self, situation: StepSituation) -> StepBudget:
        budget = _BlockEach(SIZE if self.started else 1_000, "crumbs")
        self.started = True
        return budget


class _BlockEach(StepBudget):
    def allow(self, start: int, wanted: int) -> tuple[int, str]:
        return super().allow(start, min(wanted, SIZE))


@pytest.mark.parametrize("count", [2, 5, 12])
def test_every_admitted_prefill_runs_once_in_a_while_however_many_are_before_it(count: int) -> None:
    wait_s = 0.2
    driver = Driver(num_blocks=3_000, sizer=Crumbs(), max_prefill_wait_s=wait_s)
    driver.add(*(request(f"{i}", 400, 1) for i in range(count)))
    ran = dict.fromkeys(map(str, range(count)), 0.0)
    longest = 0.0
    assert len(driver.step().admitted) == count
    while driver.scheduler.has_unfinished:
        now = driver.now
        lengths = driver.lengths(driver.step())
        for view in driver.scheduler.sequences():
            if view.request_id in lengths:
                ran[view.request_id] = now
            longest = max(longest, now - ran[view.request_id])
    assert longest <= wait_s + (count + 1) * 0.01, f"one waited {longest:.2f} s"
    ends = [event.request_id for event in driver.events if event.finish_reason]
    assert ends[0] == "0", "the first in line still has the most"
