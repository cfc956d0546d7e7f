"""After an error of its own the scheduler begins again with empty books: nobody's tokens change."""

from __future__ import annotations

import random

import pytest
from model_free import Driver, RandomChunkSizer, compute_alone, request

from octavo.core.plan import TokenEvent
from octavo.core.sampling_params import SamplingParams
from octavo.scheduler.policy import make_policy


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("seed", range(12))
def test_tokens_do_not_depend_on_where_the_scheduler_had_to_begin_again(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    driver = Driver(
        24, sizer=RandomChunkSizer(rng), max_num_seqs=4, policy=make_policy(policy, aging_s=1.0, quantum=4)  # type: ignore[arg-type]
    )  # fmt: skip
    requests = []
    for index in range(9):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
        sampling = SamplingParams(prompt_logprobs=0 if rng.random() < 0.3 else None)
        fields = {"sampling": sampling, "client": rng.choice("ab"), "priority": rng.randint(0, 2), "seed": index}
        new = request(f"r{index}", prompt, rng.randint(1, 12), **fields)
        requests.append(new)
        if rng.random() < 0.3:
            fork = {**fields, "sampling": SamplingParams(), "choice_index": 1, "fork_of": new.request_id}
            requests.append(request(f"r{index}#1", prompt, rng.randint(1, 12), **fork))
    driver.add(*requests)
    lost: set[str] = set()
    restarts = 0
    while driver.scheduler.has_unfinished:
        if rng.random() > 0.25:
            driver.step()
            continue
        restarts += 1
        plan = driver.scheduler.plan(driver.now)
        now_lost: set[str] = set()
        if rng.random() < 0.1:  # apply raised: what the step meant is lost
            driver.scheduler.apply(plan, driver.runner.execute(plan))
            now_lost = {chunk.request_id for chunk in plan.chunks}
        preempted = {s.request_id: s.num_preemptions + (s.state == "running") for s in driver.scheduler.sequences()}
        assert set(driver.scheduler.restart(now_lost)) == now_lost
        lost |= now_lost
        driver.scheduler.manager.check_integrity()
        assert driver.scheduler.manager.stats().pinned_blocks == 0
        assert driver.scheduler.num_running == 0
        assert driver.scheduler.num_waiting == len(driver.scheduler.sequences())
        for seq in driver.scheduler.sequences():
            assert seq.table is seq.awaiting is None
            assert seq.num_computed == seq.prepaid == 0
            assert seq.num_preemptions == preempted[seq.request_id]
        driver.runner.poison_free_blocks()
    assert restarts
    kept = [r for r in requests if r.request_id not in lost]
    assert kept
    for asked in kept:
        expected = compute_alone(asked)
        assert driver.tokens(asked.request_id) == expected.tokens
        assert driver.end(asked.request_id).finish_reason == expected.finish_reason
        events = [e for e in driver.events if e.request_id == asked.request_id]
        assert [t for e in events for t in e.prompt_logprobs] == expected.prompt_logprobs


def test_everybody_can_be_forgotten_also_who_could_never_run() -> None:
    driver = Driver(4)
    driver.add(request("big", 100), request("a", 3), request("b", 3))
    driver.scheduler.plan(0.0)
    assert set(driver.scheduler.restart()) == {"big", "a", "b"}
    assert not driver.scheduler.has_unfinished
    driver.add(request("a", 3))
    driver.run()
    assert driver.end("a").finish_reason == "length"


def test_who_could_never_run_is_told_after_a_plan_that_raised() -> None:
    driver = Driver(4)
    driver.add(request("big", 100), request("a", 3))
    driver.scheduler.plan(0.0)
    driver.scheduler.restart([])
    driver.run()
    assert driver.end("big") == TokenEvent("big", finish_reason="error", stop_reason=driver.end("big").stop_reason)
    assert "KV blocks" in str(driver.end("big").stop_reason)
    assert driver.tokens("a") == compute_alone(request("a", 3)).tokens
