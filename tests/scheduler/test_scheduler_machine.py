"""hypothesis drives the scheduler: any order of calls, shrunk to the shortest that breaks something."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model_free import VOCAB, ModelFreeRunner, compute_alone

from octavo.core.cache_group import FULL, CacheGroup
from octavo.core.config import EngineConfig
from octavo.core.plan import StepPlan, TokenEvent
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.scheduler.scheduler import Scheduler

LONGEST = 24
WINDOW, STATE = CacheGroup(kind="window", window=5), CacheGroup(kind="state", snapshot_blocks=2)
GROUPS = [(FULL,), (FULL,), (FULL, WINDOW), (WINDOW,), (FULL, STATE), (STATE,), (FULL, WINDOW, STATE)]
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=16)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, run, are aborted and fail; a plan may also crash."""

    @initialize(
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        chunking=st.sampled_from(["fixed", "adaptive"]),
        size=st.integers(1, 5),
        spare_blocks=st.integers(0, 6),
        num_seqs=st.integers(1, 4),
        num_tokens=st.integers(1, 20),
        groups=st.sampled_from(GROUPS),
    )
    def start(
        self,
        policy: str,
        chunking: str,
        size: int,
        spare_blocks: int,
        num_seqs: int,
        num_tokens: int,
        groups: tuple[CacheGroup, ...],
    ) -> None:
        config = EngineConfig(
            policy=policy,  # type: ignore[arg-type]
            chunking=chunking,  # type: ignore[arg-type]
            chunk_size=5,
            block_size=size,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_tokens,
            target_itl_ms=20,
        )
        num_blocks = [group.blocks_for(LONGEST, size) + spare_blocks for group in groups]
        self.groups = groups
        self.scheduler = Scheduler.from_config(config, num_blocks=num_blocks, max_model_len=LONGEST, groups=groups)
        self.runner = ModelFreeRunner(self.scheduler.manager, random.Random(0))
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, TokenEvent] = {}
        self.now = 0.0

    def take(self, events: list[TokenEvent]) -> None:
        for event in events:
            assert event.request_id not in self.ended
            if event.token is not None:
                self.tokens[event.request_id].append(event.token.token_id)
            if event.finish_reason is not None:
                self.ended[event.request_id] = event
        self.runner.poison_free_blocks()

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(0, 8),
        count=st.integers(1, 3),
        priority=st.integers(-1, 1),
        client=st.sampled_from("ab"),
        salt=st.sampled_from([b"", b"s"]),
        stop=st.frozensets(st.integers(0, VOCAB - 1), max_size=1),
        logprobs=st.sampled_from([None, None, 1]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        count: int,
        priority: int,
        client: str,
        salt: bytes,
        stop: frozenset[int],
        logprobs: int | None,
    ) -> None:
        first = f"r{len(self.requests)}"
        for choice in range(count):
            request = Request(
                request_id=f"r{len(self.requests)}",
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(prompt_logprobs=logprobs),
                max_tokens=max_tokens,
                stop_token_ids=stop,
                seed=len(self.requests),
                arrival_s=self.now,
                priority=priority,
                client=client,
                cache_salt=salt,
                choice_index=choice,
                fork_of=first if choice else None,
            )
            self.requests[request.request_id] = request
            self.tokens[request.request_id] = []
            self.runner.salts[request.request_id] = salt
            self.scheduler.add(request)

    def plan(self) -> StepPlan:
        running = self.scheduler._running
        first = running[0].request_id if running else None
        plan = self.scheduler.plan(self.now)
        assert first not in plan.preempted, "the first in policy order was preempted"
        assert bool(plan.chunks) == self.scheduler.has_unfinished, f"all wait: {plan.waiting_for}"
        assert plan.num_running + plan.num_waiting == len(self.scheduler.sequences())
        self.now += 0.01
        return plan

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            plan = self.plan()
            self.take(self.scheduler.apply(plan, self.runner.execute(plan)))

    @rule(data=st.data())
    def one_chunk_fails(self, data: st.DataObject) -> None:
        plan = self.plan()
        failed = [data.draw(st.integers(0, len(plan.chunks) - 1))] if plan.chunks else []
        self.take(self.scheduler.apply(plan, self.runner.execute(plan, failed=failed)))
        assert all(plan.chunks[i].request_id in self.ended for i in failed)

    @rule()
    def the_step_crashes(self) -> None:
        plan = self.plan()
        self.take(self.scheduler.fail_step(plan, "crash"))
        assert all(chunk.request_id in self.ended for chunk in plan.chunks)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        event = self.scheduler.finish(request_id, "abort")
        assert (event is None) == (request_id in self.ended)
        self.take([event] if event else [])

    @invariant()
    def is_consistent(self) -> None:
        self.scheduler.manager.check_integrity()
        alive = {view.request_id for view in self.scheduler.sequences()}
        assert alive == set(self.requests) - set(self.ended)
        for request_id, tokens in self.tokens.items():
            expected = compute_alone(self.requests[request_id], self.groups).tokens
            assert tokens == expected[: len(tokens)]

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2_000):
            if not self.scheduler.has_unfinished:
                break
            self.step(1)
        assert set(self.ended) == set(self.requests)
        for request_id, end in self.ended.items():
            if end.finish_reason in ("stop", "length"):
                assert self.tokens[request_id] == compute_alone(self.requests[request_id], self.groups).tokens
        assert self.scheduler.manager.stats().pinned_blocks == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
