"""The scheduler's rules, one by one. What docs/scheduling.md states, these hold it to."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from model_free import SIZE, Driver, ModelFreeRunner, compute_alone, request

from octavo.core.config import EngineConfig
from octavo.core.errors import InvalidRequest, PromptTooLong
from octavo.core.plan import ChunkReason, SampledToken, StepPlan, StepResult, TokenEvent
from octavo.core.sampling_params import SamplingParams
from octavo.memory.kv_cache_manager import KVCacheManager
from octavo.scheduler.chunk_sizer import ChunkSizer, StepBudget, StepSituation
from octavo.scheduler.cost_model import StepLoad
from octavo.scheduler.policy import FcfsPolicy
from octavo.scheduler.scheduler import Scheduler


def test_nothing_to_run_is_a_plan_without_chunks() -> None:
    driver = Driver()
    plan = driver.step()
    assert plan.chunks == ()
    assert plan.num_waiting == plan.num_running == 0
    assert not driver.scheduler.has_unfinished


def test_a_prompt_runs_in_fixed_chunks_beside_the_decodes() -> None:
    driver = Driver(chunk_size=6)
    driver.add(request("a", 3, 20))
    driver.step()
    driver.add(request("b", 15))
    assert [driver.lengths(driver.step()) for _ in range(4)] == [
        {"a": 1, "b": 6},
        {"a": 1, "b": 6},
        {"a": 1, "b": 3},
        {"a": 1, "b": 1},
    ]
    reasons = [[chunk.reason for chunk in plan.chunks] for plan in driver.plans[1:5]]
    assert reasons == [["decode", "budget"], ["decode", "budget"], ["decode", "last piece"], ["decode", "decode"]]


@pytest.mark.parametrize(("limit", "running"), [(4, 4), (5, 4), (3, 3)])
def test_as_many_decodes_run_as_the_step_has_room_for(limit: int, running: int) -> None:
    driver = Driver(max_num_batched_tokens=limit)
    driver.add(*(request(f"{i}", 1, 40) for i in range(4)))
    driver.step()
    for _ in range(5):
        assert [chunk.reason for chunk in driver.step().chunks] == ["decode"] * running


def test_one_token_chunks_come_first() -> None:
    driver = Driver(chunk_size=8)
    driver.add(request("long", 7, 8), request("one", 1, 8))
    assert [chunk.request_id for chunk in driver.step().chunks] == ["one", "long"]


def test_a_chunk_carries_what_its_draw_needs() -> None:
    driver = Driver(chunk_size=4)
    sampling = SamplingParams(presence_penalty=0.5, min_tokens=2, stop_token_ids=(900, 901))
    driver.add(request("a", 6, 4, sampling=sampling))
    first, second, third, fourth = (driver.step().chunks[0] for _ in range(4))
    assert first.draw is None
    assert second.draw is not None
    assert second.draw.params is sampling
    assert len(second.draw.history) == 9  # a view: two more tokens and the last have joined since
    assert second.draw.prompt_len == 6
    assert second.draw.banned_token_ids == (900, 901)
    assert third.draw is second.draw
    assert fourth.draw == replace(second.draw, banned_token_ids=(), later=None)
    assert (second.start, second.end, len(second.block_tables[0])) == (4, 6, 2)


def test_a_second_request_with_the_same_prefix_computes_only_the_rest() -> None:
    driver = Driver(num_blocks=300)
    system = list(range(512))
    driver.add(request("a", [*system, 1, 2, 3]))
    driver.run()
    driver.add(request("b", [*system, 7, 8, 9]))
    driver.run()
    (admission,) = [a for plan in driver.plans for a in plan.admitted if a.request_id == "b"]
    assert admission.cached_tokens == 512
    assert driver.computed("b") == 3 + 3  # its own prompt tokens, and three of its four output tokens
    stats = driver.scheduler.manager.stats()
    assert (stats.lookups, stats.hits, stats.hit_tokens) == (2, 1, 512)


def test_the_last_prompt_token_is_always_computed() -> None:
    driver = Driver()
    prompt = list(range(8))
    for name in ("a", "b"):
        driver.add(request(name, prompt))
        driver.run()
    (admission,) = driver.plans[-4].admitted
    assert (admission.request_id, admission.cached_tokens, admission.miss_reason) == ("b", 7, "end of prompt")
    assert driver.tokens("a") == driver.tokens("b")


def test_sixteen_that_arrive_together_compute_their_prefix_once() -> None:
    driver = Driver(num_blocks=400, chunk_size=100)
    system = list(range(512))
    driver.add(*(request(f"r{i}", [*system, 1_000 + i, 5], 2) for i in range(16)))
    first = driver.step()
    assert set(first.waiting_for.values()) == {"shared_prefix_in_flight"}
    driver.run()
    assert sum(driver.computed(f"r{i}") for i in range(16)) == 512 + 16 * (2 + 1)
    assert len(driver.plans) <= 6 + 1 + 3


def test_a_different_request_passes_those_that_wait_for_a_shared_prefix() -> None:
    driver = Driver(num_blocks=400, chunk_size=100)
    system = list(range(90))
    driver.add(request("a", [*system, 1]), request("b", [*system, 2]), request("c", 5))
    plan = driver.step()
    assert driver.lengths(plan) == {"a": 91, "c": 5}
    assert plan.waiting_for == {"b": "shared_prefix_in_flight"}


@pytest.mark.parametrize("how", ["abort", "crash", "bad numbers"])
def test_whoever_waits_for_a_shared_prefix_is_released_if_its_owner_ends(how: str) -> None:
    driver = Driver(chunk_size=4)
    system = list(range(30))
    driver.add(request("a", [*system, 1]), request("b", [*system, 2]))
    assert driver.step().waiting_for == {"b": "shared_prefix_in_flight"}
    if how == "abort":
        driver.scheduler.finish("a", "abort")
    else:
        plan = driver.scheduler.plan(driver.now)
        if how == "crash":
            driver.scheduler.fail_step(plan, "crash")
        else:
            driver.scheduler.apply(plan, driver.runner.execute(plan, failed=[0]))
    plan = driver.step()
    assert [chunk.request_id for chunk in plan.chunks] == ["b"]
    driver.run()
    assert driver.tokens("b") == compute_alone(request("b", [*system, 2])).tokens


def test_nobody_overtakes_a_request_that_lacks_memory() -> None:
    driver = Driver(num_blocks=10)
    driver.add(request("a", 20, 10), request("large", 24, 2), request("small", 2, 2))
    plan = driver.step()
    assert driver.lengths(plan) == {"a": 20}
    assert plan.waiting_for == {"large": "memory"}
    driver.run()
    ends = [e.request_id for e in driver.events if e.finish_reason]
    assert ends.index("a") < ends.index("small")


def test_the_newest_is_preempted_and_returns_first_when_it_fits() -> None:
    driver = Driver(num_blocks=8)
    driver.add(request("a", 7, 16), request("b", 7, 16), request("c", 7, 16))
    while not driver.step().preempted:
        pass
    assert driver.plans[-1].preempted == ("c",)
    seq = {s.request_id: s for s in driver.scheduler.sequences()}["c"]
    assert (seq.state, seq.num_preemptions, seq.table) == ("preempted", 1, None)
    driver.add(request("d", 2, 2))
    driver.run()
    admitted = [a.request_id for plan in driver.plans for a in plan.admitted]
    assert "a" not in [name for plan in driver.plans for name in plan.preempted]
    assert admitted.index("d") > [i for i, name in enumerate(admitted) if name == "c"][1]
    for name in "abc":
        assert driver.tokens(name) == compute_alone(request(name, 7, 16)).tokens


def test_a_preempted_sequence_returns_only_with_room_for_all_of_it_and_a_block_for_each_other() -> None:
    driver = Driver(num_blocks=8)
    driver.add(request("a", 7, 16), request("b", 7, 16), request("c", 7, 16))
    for _ in range(200):
        plan = driver.step()
        for admission in plan.admitted:
            if admission.facts["preemptions"]:
                seq = {s.request_id: s for s in driver.scheduler.sequences()}[admission.request_id]
                running, num_blocks = plan.num_running, 0 if seq.table is None else len(seq.table)
                assert plan.free_blocks + num_blocks >= -(-seq.num_tokens // SIZE) + running - 1 - 1
    ping_pong = [name for plan in driver.plans for name in plan.preempted]
    assert len(ping_pong) <= 4, "it came back too early and had to go again"


def test_a_request_that_can_never_fit_fails_and_nobody_else_does() -> None:
    driver = Driver(num_blocks=4)
    driver.add(request("huge", 14, 4), request("fits", 13, 4))
    assert driver.scheduler.has_unfinished
    plan = driver.step()
    ((request_id, why),) = plan.failed
    assert request_id == "huge"
    assert why.startswith("the request needs 5 KV blocks but the pool has 4")
    assert driver.end("huge").finish_reason == "error"
    assert driver.end("huge").stop_reason == why
    driver.run()
    assert driver.end("fits").finish_reason == "length"


def test_a_request_that_can_never_fit_can_still_be_aborted() -> None:
    driver = Driver(num_blocks=1)
    driver.add(request("huge", 14, 4))
    assert driver.scheduler.finish("huge", "abort") == TokenEvent(request_id="huge", finish_reason="abort")
    assert not driver.scheduler.has_unfinished


def test_prompt_logprobs_are_asked_once_and_skip_the_lookup_but_fill_the_cache() -> None:
    driver = Driver(num_blocks=6, chunk_size=5)
    wanted = SamplingParams(prompt_logprobs=2)
    prompt = list(range(12))
    driver.add(request("first", prompt, 2))
    driver.run()
    driver.add(request("a", 4, 14), request("b", prompt, 4, sampling=wanted))
    driver.run()
    assert any("b" in plan.preempted for plan in driver.plans)
    chunks = [chunk for plan in driver.plans for chunk in plan.chunks if chunk.request_id == "b"]
    asked = [(chunk, chunk.want_logprobs) for chunk in chunks if chunk.want_logprobs is not None]
    assert [p for _, owed in asked for p in owed.positions] == list(range(1, 12))
    assert [token for _, owed in asked for token in owed.token_ids] == prompt[1:]
    assert {owed.num_alternatives for _, owed in asked} == {2}
    assert all(p - 1 in range(c.start, c.end) for c, owed in asked for p in owed.positions)
    (got,) = [[lp for e in driver.events if e.request_id == "b" for lp in e.prompt_logprobs]]
    assert got == compute_alone(request("b", prompt, 4, sampling=wanted)).prompt_logprobs
    first_admission = next(a for plan in driver.plans for a in plan.admitted if a.request_id == "b")
    assert (first_admission.cached_tokens, first_admission.miss_reason) == (0, "prompt logprobs")


def test_no_tokens_asked_means_the_prompt_runs_and_nothing_is_drawn() -> None:
    driver = Driver(chunk_size=4)
    driver.add(request("a", 6, 0, sampling=SamplingParams(prompt_logprobs=0)))
    driver.run()
    chunks = [chunk for plan in driver.plans for chunk in plan.chunks]
    assert all(chunk.draw is None for chunk in chunks)
    assert {chunk.want_logprobs.num_alternatives for chunk in chunks if chunk.want_logprobs} == {0}
    assert driver.computed("a") == 6
    assert driver.end("a").finish_reason == "length"
    assert sum(len(e.prompt_logprobs) for e in driver.events) == 5


class Script(ModelFreeRunner):
    """Draws the same token each time."""

    token = 5

    def execute(self, plan: StepPlan, **_: object) -> StepResult:  # type: ignore[override]
        token = SampledToken(token_id=self.token)
        return StepResult(step_id=plan.step_id, tokens=tuple((token,) if c.draw else () for c in plan.chunks))


@pytest.mark.parametrize(
    ("own_stops", "all_stops", "min_tokens", "outcome"),
    [
        ((5,), {5, 2}, 0, ("stop", 5, 1)),  # the caller's own stop token
        ((), {5}, 0, ("stop", None, 1)),  # the model's end of text
        ((), {2}, 0, ("length", None, 4)),
        ((5,), {5}, 3, ("stop", 5, 3)),  # (a runner that minds banned_token_ids would not draw it before)
    ],
)
def test_why_a_request_ends(
    own_stops: tuple[int, ...], all_stops: set[int], min_tokens: int, outcome: tuple[str, int | None, int]
) -> None:
    driver = Driver()
    driver.runner = Script(driver.scheduler.manager, random.Random(0))
    sampling = SamplingParams(stop_token_ids=own_stops, min_tokens=min_tokens)
    driver.add(request("a", 3, 4, sampling=sampling, stop_token_ids=frozenset(all_stops)))
    driver.run()
    end = driver.end("a")
    assert (end.finish_reason, end.stop_reason, len(driver.tokens("a"))) == outcome


def test_forks_compute_the_prompt_once_and_draw_from_their_own_streams() -> None:
    driver = Driver(chunk_size=10)
    family = [
        request(f"n{i}", list(range(30)), 6, choice_index=i, fork_of="n0" if i else None, seed=3) for i in range(4)
    ]
    driver.add(*family)
    assert driver.step().waiting_for == {"n1": "fork_parent", "n2": "fork_parent", "n3": "fork_parent"}
    driver.run()
    assert driver.computed("n0") == 30 + 5
    for child in family[1:]:
        assert driver.computed(child.request_id) == 1 + 5  # its own last prompt token, then its output
        admission = next(a for p in driver.plans for a in p.admitted if a.request_id == child.request_id)
        assert (admission.cached_tokens, admission.miss_reason) == (29, "forked")
    outputs = [driver.tokens(member.request_id) for member in family]
    assert outputs == [compute_alone(member).tokens for member in family]
    assert len({tuple(output) for output in outputs}) > 1
    copies = [copy for plan in driver.plans for copy in plan.block_copies]
    assert [num_tokens for *_, num_tokens in copies] == [1, 1, 1]


def test_if_the_parent_ends_early_the_first_child_takes_its_place() -> None:
    driver = Driver(chunk_size=10)
    family = [request(f"n{i}", list(range(30)), 3, choice_index=i, fork_of="n0" if i else None) for i in range(3)]
    driver.add(*family)
    driver.step()
    driver.scheduler.finish("n0", "abort")
    plan = driver.step()
    assert driver.lengths(plan) == {"n1": 10}
    assert plan.waiting_for == {"n2": "fork_parent"}
    driver.run()
    for member in family[1:]:
        assert driver.tokens(member.request_id) == compute_alone(member).tokens
    assert driver.computed("n2") == 1 + 2


def test_if_the_parent_is_preempted_early_a_child_does_not_wait_for_it_forever() -> None:
    driver = Driver(num_blocks=12, chunk_size=4)
    driver.add(request("old", 8, 37))
    driver.step()
    driver.add(*(request(f"n{i}", list(range(30)), 3, choice_index=i, fork_of="n0" if i else None) for i in range(3)))
    driver.run()
    assert all(driver.end(name).finish_reason == "length" for name in ("old", "n0", "n1", "n2"))


def test_a_crashed_step_fails_its_requests_and_commits_nothing() -> None:
    driver = Driver(chunk_size=16, max_num_seqs=2)
    driver.add(request("a", 16), request("b", 3), request("waiting", 3))
    plan = driver.scheduler.plan(0.0)
    events = driver.scheduler.fail_step(plan, "boom")
    assert [(e.request_id, e.finish_reason, e.stop_reason) for e in events] == [("a", "error", "boom")]
    driver.scheduler.manager.check_integrity()
    assert driver.scheduler.manager.stats().nodes == 0
    assert driver.scheduler.manager.stats().pinned_blocks == 0
    driver.run()
    assert driver.end("waiting").finish_reason == "length"


def test_bad_numbers_fail_one_request_and_take_its_blocks_out_of_the_cache() -> None:
    driver = Driver(chunk_size=8)
    driver.add(request("bad", 12), request("good", 3))
    driver.step()
    plan = driver.scheduler.plan(0.01)
    bad = [chunk.request_id for chunk in plan.chunks].index("bad")
    driver.events += driver.scheduler.apply(plan, driver.runner.execute(plan, failed=[bad]))
    assert driver.end("bad").finish_reason == "error"
    assert driver.scheduler.manager.stats().nodes == 0
    driver.run()
    assert driver.end("good").finish_reason == "length"


def test_calls_out_of_turn_are_refused() -> None:
    driver = Driver()
    driver.add(request("a", 3))
    plan = driver.scheduler.plan(0.0)
    result = driver.runner.execute(plan)
    for call in (
        lambda: driver.scheduler.plan(0.0),
        lambda: driver.scheduler.add(request("b", 3)),
        lambda: driver.scheduler.finish("a", "abort"),
    ):
        with pytest.raises(RuntimeError, match="inside step 1"):
            call()
    driver.scheduler.apply(plan, result)
    with pytest.raises(RuntimeError, match="step 1 is not the plan being run"):
        driver.scheduler.apply(plan, result)


def test_finishing_is_idempotent_and_gives_the_blocks_back() -> None:
    driver = Driver()
    driver.add(request("running", 9), request("other", 3))
    driver.step()
    driver.add(request("waiting", 9))
    for name in ("running", "waiting"):
        assert driver.scheduler.finish(name, "stop", "END") == TokenEvent(
            request_id=name, finish_reason="stop", stop_reason="END"
        )
        assert driver.scheduler.finish(name, "abort") is None
    assert driver.scheduler.finish("never seen", "abort") is None
    driver.scheduler.manager.check_integrity()
    assert [view.request_id for view in driver.scheduler.sequences()] == ["other"]
    assert driver.scheduler.manager.stats().pinned_blocks == 1


def test_requests_that_contradict_the_engine_are_refused_by_name() -> None:
    driver = Driver(max_model_len=20)
    driver.add(request("a", 3))
    with pytest.raises(InvalidRequest, match="'a' is in use"):
        driver.add(request("a", 3))
    with pytest.raises(PromptTooLong, match="21 tokens but max_model_len is 20"):
        driver.add(request("b", 17, 4))
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        driver.add(request("c", []))
    with pytest.raises(InvalidRequest, match="fork 'd' has another prompt or salt than 'a'"):
        driver.add(request("d", 3, fork_of="a"))
    with pytest.raises(InvalidRequest, match="fork 'd' has another prompt or salt than 'a'"):
        driver.add(request("d", list(request("a", 3).prompt_token_ids), fork_of="a", cache_salt=b"other"))
    driver.add(request("b", 17, 3))  # just fits


def test_an_id_may_be_used_again_once_its_request_has_ended() -> None:
    driver = Driver()
    for prompt in ([1, 2, 3], [4, 5]):
        for name, fields in (("a", {}), ("a#1", {"fork_of": "a", "choice_index": 1})):
            driver.add(request(name, prompt, **fields))
        driver.run()
        assert not driver.scheduler._groups


class Parts(StepBudget):
    """Gives no chunk more than two tokens."""

    def allow(self, start: int, wanted: int) -> tuple[int, ChunkReason]:
        tokens, reason = super().allow(start, wanted)
        return min(tokens, 2), reason


class Recorder(ChunkSizer):
    """Keeps what it is told."""

    def __init__(self, tokens: int, budget: type[StepBudget] = StepBudget) -> None:
        self.tokens, self.budget = tokens, budget
        self.manager: KVCacheManager | None = None
        self.began: list[tuple[StepSituation, int]] = []  # and the blocks that there were
        self.observed: list[tuple[StepLoad, int]] = []

    def begin(self, situation: StepSituation) -> StepBudget:
        if self.manager is not None:
            self.began.append((situation, self.manager.num_available))
        return self.budget(self.tokens, "budget")

    def observe(self, load: StepLoad, prefill_tokens: int, duration_s: float) -> None:
        self.observed.append((load, prefill_tokens))


def test_the_sizer_is_told_what_ran_and_how_many_blocks_prefill_may_take() -> None:
    sizer = Recorder(8)
    driver = Driver(num_blocks=14, sizer=sizer)
    sizer.manager = driver.scheduler.manager
    driver.add(request("a", 3, 20), request("b", 5, 20), request("c", 25, 4))
    while driver.scheduler.has_unfinished:
        plan = driver.step()
        ones = [chunk.end for chunk in plan.chunks if len(chunk.token_ids) == 1]
        expected = StepLoad(len(ones), sum(ones), sum(ones))
        for chunk in plan.chunks[len(ones) :]:
            expected = expected.with_chunk(chunk.start, len(chunk.token_ids))
        prefill = sum(len(chunk.token_ids) for chunk in plan.chunks if chunk.reason != "decode")
        assert sizer.observed[-1] == (expected, prefill)
    for situation, available in sizer.began:
        assert situation.spare_blocks == max(0, available - situation.decodes.tokens)
    assert any(situation.decodes.tokens and situation.spare_blocks for situation, _ in sizer.began)
    assert len(sizer.began) < len(sizer.observed), "a step with nothing to prefill has no budget"


def test_whoever_got_nothing_for_too_long_goes_first() -> None:
    sizer = Recorder(4, Parts)
    driver = Driver(num_blocks=300, sizer=sizer, max_prefill_wait_s=0.045)
    driver.add(request("a", 90), request("b", 90))
    assert driver.lengths(driver.step()) == {"a": 2, "b": 2}
    sizer.tokens = 2
    ran = [next(iter(driver.lengths(driver.step()))) for _ in range(12)]
    assert ran == ["a", "a", "a", "a", "b"] * 2 + ["a", "a"], "steps last 10 ms"


def test_a_plan_counts_the_blocks_that_were_evicted_for_it() -> None:
    driver = Driver(num_blocks=6)
    for name in "abcd":
        driver.add(request(name, 14, 6))
        driver.run()
    evicted = [plan.evicted for plan in driver.plans]
    assert sum(evicted) == driver.scheduler.manager.num_evicted > max(evicted) > 0


def test_the_policy_charges_a_prompt_without_what_the_cache_gave() -> None:
    charged: list[tuple[str, int]] = []
    policy = FcfsPolicy()
    policy.admitted = lambda seq, num_tokens: charged.append((seq.request_id, num_tokens))  # type: ignore[method-assign]
    driver = Driver(policy=policy)
    for name, tail in (("a", 1), ("b", 2)):
        driver.add(request(name, [*range(4 * SIZE), tail, 7]))
        driver.run()
    assert charged == [("a", 4 * SIZE + 2), ("b", 2)]


def test_no_more_sequences_run_at_once_than_allowed() -> None:
    driver = Driver(max_num_seqs=3)
    driver.add(*(request(f"r{i}", 2, 5) for i in range(8)))
    plan = driver.step()
    assert (plan.num_running, plan.num_waiting) == (3, 5)
    assert plan.waiting_for == {"r3": "max_num_seqs"}
    driver.run()
    assert max(plan.num_running for plan in driver.plans) == 3


def test_the_example_in_the_docs_is_what_happens() -> None:
    driver, stem = Driver(num_blocks=8, chunk_size=8), [10, 11, 12, 13]
    driver.add(request("A", [*stem, 1, 2, 3, 4, 5, 6], 9))
    driver.step()
    driver.add(request("B", [*stem, 1, 2, 7, 8, 9], 10), request("C", [*stem, 1, 2, 3, 4, 5, 7, 7], 2))
    driver.run()
    rows = []
    for plan in driver.plans:
        cells = {chunk.request_id: f"[{chunk.start}, {chunk.end})" for chunk in plan.chunks}
        cells |= dict.fromkeys(plan.preempted, "preempted")
        rows.append([str(plan.step_id), *(cells.get(name, "-") for name in "ABC")])
    page = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text()
    table = page[page.index("step    A") :].splitlines()[1 : len(rows) + 1]
    assert [re.split(r"  +", line.strip())[:4] for line in table] == rows


def test_the_config_builds_what_it_names() -> None:
    config = EngineConfig(policy="fair", chunking="fixed", chunk_size=33, block_size=8, enable_prefix_caching=False)
    scheduler = Scheduler.from_config(config, num_blocks=10, max_model_len=80)
    assert scheduler.manager.block_size == 8
    assert scheduler.manager.num_blocks == (10,)
    assert not scheduler.manager.enable_prefix_caching
    scheduler.add(request("a", 50, 4))
    plan = scheduler.plan(0.0)
    assert len(plan.chunks[0].token_ids) == 33
    assert plan.budget is not None
    assert (plan.budget.tokens, plan.budget.reason) == (33, "budget")
    adaptive = Scheduler.from_config(EngineConfig(target_itl_ms=70), num_blocks=10, max_model_len=160)
    adaptive.add(request("a", 50, 4))
    assert adaptive.plan(0.0).chunks[0].reason == "last piece"


def test_the_head_of_the_queue_counts_as_held_up_by_the_budget_only_while_it_is() -> None:
    """What it has waited stretches the target of every step: a head that has left must not go on waiting."""
    driver = Driver(chunk_size=4, num_blocks=300)
    admission = driver.scheduler._admission
    driver.add(request("first", 12, 4))
    driver.step()
    assert admission.head_waits_since() == []
    for leave in ("abort", "another ends", "restart", "admission"):
        driver.add(request("head", 30, 4))
        driver.step()
        assert driver.plans[-1].waiting_for == {"head": "budget"}
        assert len(admission.head_waits_since()) == 1, leave
        if leave == "another ends":
            driver.add(request("other", 30, 4))
            driver.scheduler.finish("other", "abort")
            assert len(admission.head_waits_since()) == 1, "somebody else has left"
        elif leave == "restart":
            driver.scheduler.restart(["head"])
        elif leave == "admission":
            while driver.plans[-1].waiting_for:
                driver.step()
        if leave != "restart" and leave != "admission":
            driver.scheduler.finish("head", "abort")
        assert admission.head_waits_since() == [], leave
        if leave != "admission":
            driver.scheduler.restart()
            driver.add(request("first", 12, 4))
            driver.step()


def test_one_who_did_not_fit_and_left_does_not_keep_a_smaller_one_out() -> None:
    driver = Driver(num_blocks=12)
    driver.add(request("running", 4 * SIZE, 2 * SIZE))
    driver.step()
    driver.add(request("big", 8 * SIZE, SIZE))
    driver.step()
    assert driver.plans[-1].waiting_for == {"big": "memory"}
    driver.scheduler.finish("big", "abort")
    driver.add(request("small", 2, 2))
    assert [admission.request_id for admission in driver.step().admitted] == ["small"]
