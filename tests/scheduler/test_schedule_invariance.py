"""Promise 1, without a model: what a request gets does not depend on how it was scheduled."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from model_free import VOCAB, Guesser, ModelFreeRunner, RandomChunkSizer, StepCrash, compute_alone
from rules import WatchedScheduler, most_blocks

from octavo.core.cache_group import FULL, CacheGroup
from octavo.core.plan import SampledToken, StepPlan, TokenEvent
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.memory.block_pool import BlockPool
from octavo.memory.block_table import BlockTable
from octavo.memory.group_blocks import GroupBlocks
from octavo.memory.kv_cache_manager import KVCacheManager
from octavo.memory.prefix_tree import Node, PrefixTree
from octavo.scheduler.chunk_sizer import AdaptiveChunkSizer, FixedChunkSizer
from octavo.scheduler.policy import make_policy

NUM_SCHEDULES = 300


@dataclass
class Schedule:
    """One random life of a scheduler: requests arrive, are aborted, fail, and all must come out as computed alone."""

    seed: int
    mixed: bool = False  # over a random mix of cache groups, not one full group
    drafts: bool = False  # guessed tokens behind decodes
    rng: random.Random = field(init=False)
    ended: dict[str, TokenEvent] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[SampledToken]] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.size = rng.choice((1, 2, 3, 4, 4, 8))
        self.longest = rng.choice((12, 20, 40))
        fits_longest = -(-self.longest // self.size)
        num_blocks = fits_longest + rng.choice((0, 1, 2, fits_longest // 2, fits_longest, 2 * fits_longest))
        caching = rng.random() < 0.9
        self.groups, counts = random_groups(self, num_blocks) if self.mixed else ((FULL,), (num_blocks,))
        manager = KVCacheManager(counts, self.size, groups=self.groups, enable_prefix_caching=caching)
        sizer = rng.choice(
            (RandomChunkSizer(rng), FixedChunkSizer(rng.randint(1, 20)), AdaptiveChunkSizer(self.size, 0.02))
        )
        self.scheduler = WatchedScheduler(
            manager,
            policy=make_policy(rng.choice(("fcfs", "priority", "fair")), aging_s=0.5, quantum=self.size),
            sizer=sizer,
            max_num_seqs=rng.choice((1, 3, 8, 16, 16)),
            max_num_batched_tokens=rng.choice((1, 6, 20, 50, 100)),
            max_model_len=None,
            max_prefill_wait_s=0.3,
        )
        if self.drafts:
            self.scheduler.drafter = Guesser(random.Random(self.seed), self.groups)
        self.runner = ModelFreeRunner(manager, rng)
        stems = [[rng.randrange(VOCAB) for _ in range(self.longest)] for _ in range(3)]
        self.inbox = [group for i in range(rng.randint(1, 4)) for group in self.random_requests(i, stems)]
        self.inbox.sort(key=lambda group: group[0].arrival_s)

    def random_requests(self, number: int, stems: list[list[int]]) -> list[list[Request]]:
        """A prompt with 1 to 4 answers, and sometimes the same again."""
        rng = self.rng
        shared = rng.randint(0, self.longest // 2)
        prompt = rng.choice(stems)[:shared] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))]
        prompt = prompt[: self.longest - 1]
        max_tokens = rng.randint(0, self.longest - len(prompt))
        max_tokens += (rng.random() < 0.02) * 100  # can never fit
        stop = frozenset(rng.sample(range(VOCAB), rng.choice((0, 0, 0, 0, 1))))
        sampling = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, max_tokens // 2),
            stop_token_ids=tuple(token for token in stop if rng.random() < 0.5),
            prompt_logprobs=0 if rng.random() < 0.15 else None,
        )
        salt = rng.choice((b"", b"", b"", b"a"))
        groups = []
        for repeat in range(rng.choice((1, 1, 2))):
            arrival_s = rng.random() / 2
            first = f"{number}.{repeat}.0"
            groups.append(
                [
                    Request(
                        request_id=f"{number}.{repeat}.{choice}",
                        prompt_token_ids=tuple(prompt),
                        sampling=sampling,
                        max_tokens=max_tokens,
                        stop_token_ids=stop,
                        seed=number,
                        arrival_s=arrival_s,
                        priority=rng.randint(-2, 2) if choice == 0 else 0,
                        client=rng.choice("AB"),
                        cache_salt=salt,
                        choice_index=choice,
                        fork_of=first if choice else None,
                    )
                    for choice in range(rng.choice((1, 1, 2, 4)))
                ]
            )
        return groups

    def run(self) -> None:
        now = 0.0
        for _ in range(20_000):
            if not (self.inbox or self.scheduler.has_unfinished):
                break
            while self.inbox and (self.inbox[0][0].arrival_s <= now or not self.scheduler.has_unfinished):
                for request in self.inbox.pop(0):
                    self.requests[request.request_id] = request
                    self.runner.salts[request.request_id] = request.cache_salt
                    self.scheduler.add(request)
            self.step(now)
            now += 0.05
            if self.rng.random() < 0.05 and self.requests:
                victim = self.rng.choice(sorted(self.requests))
                self.take([event] if (event := self.scheduler.finish(victim, "abort")) else [])
                self.runner.poison_free_blocks()
                self.scheduler.manager.check_integrity()
        self.check_end()

    def step(self, now: float) -> None:
        if not self.scheduler.has_unfinished:
            return
        plan = self.scheduler.plan(now)
        assert plan.chunks or plan.failed, f"seed {self.seed}: nothing runs but {plan.waiting_for} wait"
        lengths = [len(chunk.token_ids) for chunk in plan.chunks]
        assert sorted(lengths, key=lambda n: n > 1) == lengths
        assert sum(lengths) <= self.scheduler._max_num_batched_tokens
        self.count(preempted=len(plan.preempted), copies=len(plan.block_copies), evicted=plan.evicted)
        for admission in plan.admitted:
            self.count(cached_tokens=admission.cached_tokens, **{admission.miss_reason: 1})
        self.count(herd_waits="shared_prefix_in_flight" in plan.waiting_for.values())
        failed: list[int] = []
        if plan.chunks and self.rng.random() < 0.01:
            failed = [self.rng.randrange(len(plan.chunks))]
        try:
            result = self.runner.execute(plan, failed=failed, crash=self.rng.random() < 0.005)
        except StepCrash:
            self.take(self.scheduler.fail_step(plan, "the step crashed"))
        else:
            events = self.scheduler.apply(plan, result)
            self.take(events)
            self.count_drafts(plan, events)
        self.runner.poison_free_blocks()
        if self.rng.random() < 0.1:
            self.scheduler.manager.check_integrity()

    def count_drafts(self, plan: StepPlan, events: list[TokenEvent]) -> None:
        for chunk in plan.chunks:
            if chunk.reason == "verify":
                mine = [event for event in events if event.request_id == chunk.request_id]
                taken = len([event for event in mine if event.token is not None])
                self.count(
                    drafted=len(chunk.token_ids) - 1,
                    accepted=taken - 1,
                    across_blocks=chunk.start // self.size < (chunk.start + taken - 1) // self.size,
                    ended_early=mine[-1].finish_reason in ("stop", "length") and taken < len(chunk.token_ids),
                    failed_late=mine[-1].finish_reason == "error" and taken > 0,
                )

    def take(self, events: list[TokenEvent]) -> None:
        for event in events:
            assert event.request_id not in self.ended, f"{event.request_id} goes on after its end"
            if event.token is not None:
                self.tokens.setdefault(event.request_id, []).append(event.token.token_id)
            self.logprobs.setdefault(event.request_id, []).extend(event.prompt_logprobs)
            if event.finish_reason is not None:
                self.ended[event.request_id] = event
                self.count(**{event.finish_reason: 1})

    def count(self, **news: int) -> None:
        for name, number in news.items():
            self.counts[name] = self.counts.get(name, 0) + number

    def check_end(self) -> None:
        assert set(self.ended) == set(self.requests), f"seed {self.seed}: not every request ended"
        self.scheduler.manager.check_integrity()
        stats = self.scheduler.manager.stats()
        assert stats.pinned_blocks == 0
        assert stats.free_blocks + stats.cached_blocks == stats.num_blocks
        assert not self.scheduler.manager._in_flight
        for request_id, request in self.requests.items():
            where = f"seed {self.seed}, request {request_id}"
            expected, end = compute_alone(request, self.groups), self.ended[request_id]
            tokens, logprobs = self.tokens.get(request_id, []), self.logprobs.get(request_id, [])
            positions = len(request.prompt_token_ids) + max(request.max_tokens - 1, 0)
            manager = self.scheduler.manager
            if end.finish_reason != "abort":
                needs = [most_blocks(manager, group, positions) for group in range(len(self.groups))]
                too_large = any(need > have for need, have in zip(needs, manager.num_blocks, strict=True))
                assert too_large == str(end.stop_reason).startswith("the request needs"), where
            if end.finish_reason in ("abort", "error"):  # what came before was right
                assert tokens == expected.tokens[: len(tokens)], where
                assert logprobs == expected.prompt_logprobs[: len(logprobs)], where
            else:
                assert tokens == expected.tokens, where
                assert logprobs == expected.prompt_logprobs, where
                assert (end.finish_reason, end.stop_reason) == (expected.finish_reason, expected.stop_reason), where


def random_groups(schedule: Schedule, num_blocks: int) -> tuple[tuple[CacheGroup, ...], tuple[int, ...]]:
    """Any mix of groups, and how many blocks each has: from hardly enough for the longest to plenty."""
    rng, size, longest = random.Random(schedule.seed), schedule.size, schedule.longest
    groups = [FULL] if rng.random() < 0.7 else []
    windows = rng.sample(range(1, 20), rng.choice((0, 1, 1, 2)))
    groups += [CacheGroup(kind="window", window=window) for window in windows]
    if rng.random() < 0.5 or not groups:
        groups.append(CacheGroup(kind="state", snapshot_blocks=rng.choice((1, 2, 3))))
    if rng.random() < 0.3:
        rng.shuffle(groups)
    counts = []
    for group in groups:
        least = min(num_blocks, KVCacheManager(1, size, groups=[group])._blocks[0].blocks_for(longest))
        counts.append(least + rng.choice((0, 1, 2, least // 2, least, 2 * least, 4 * least)))
    return tuple(groups), tuple(counts)


def run_schedules(seeds: range, *, mixed: bool = False, drafts: bool = False) -> dict[str, int]:
    """Run them -> how often what happened in all."""
    total: dict[str, int] = {}
    for seed in seeds:
        schedule = Schedule(seed, mixed, drafts)
        schedule.run()
        for name, number in schedule.counts.items():
            total[name] = total.get(name, 0) + number
    return total


def test_tokens_do_not_depend_on_chunking_batching_prefix_hits_or_preemption() -> None:
    total = run_schedules(range(NUM_SCHEDULES))
    # The schedules did what the name says, often.
    for name in ("preempted", "copies", "evicted", "cached_tokens", "forked", "herd_waits", "abort", "error", "stop"):
        assert total[name] >= NUM_SCHEDULES // 4, f"{name} happened only {total[name]} times"


def test_nor_in_a_model_whose_layers_keep_different_things() -> None:
    total = run_schedules(range(NUM_SCHEDULES), mixed=True)
    for name in ("preempted", "copies", "evicted", "cached_tokens", "forked", "herd_waits", "window given back",
                 "no snapshot"):  # fmt: skip
        assert total[name] >= NUM_SCHEDULES // 4, f"{name} happened only {total[name]} times"


@pytest.mark.slow
def test_nor_in_three_thousand_more_schedules_of_such_models() -> None:
    run_schedules(range(NUM_SCHEDULES, NUM_SCHEDULES + 3_000), mixed=True)


@pytest.mark.slow
def test_tokens_do_not_depend_on_five_thousand_more_schedules() -> None:
    run_schedules(range(NUM_SCHEDULES, NUM_SCHEDULES + 5_000))


# The test's own teeth: each bug below, planted, must make it fail, with the bookkeeping's self-checks switched off.


def hand_out_a_block_twice(patch: pytest.MonkeyPatch) -> None:
    allocate, calls = BlockPool.allocate, [0]

    def planted(pool: BlockPool) -> int:
        block = allocate(pool)
        calls[0] += 1
        if calls[0] % 20 == 0:
            pool._free.append(block)
        return block

    patch.setattr(BlockPool, "allocate", planted)


def cache_without_holding(patch: pytest.MonkeyPatch) -> None:
    """The tree forgets to take its reference: the block is freed with its sequence, yet found later."""
    attach = GroupBlocks.attach

    def planted(group: GroupBlocks, node: Node, block: int, now: int) -> None:
        attach(group, node, block, now)
        group.pool.release(block)

    patch.setattr(GroupBlocks, "attach", planted)
    patch.setattr(BlockPool, "release", lambda pool, block: release_leniently(pool, block))


def release_leniently(pool: BlockPool, block: int) -> int:
    if pool._refs[block] > 0:
        pool._refs[block] -= 1
        if pool._refs[block] == 0:
            pool._free.append(block)
    return pool._refs[block]


def evict_what_is_in_use(patch: pytest.MonkeyPatch) -> None:
    """Shared blocks are not pinned by those that share them."""
    patch.setattr(KVCacheManager, "_retain", lambda manager, group, block: None)
    patch.setattr(BlockPool, "release", lambda pool, block: release_leniently(pool, block))


def drop_the_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCacheManager, "take_copies", lambda manager: ())


def cache_one_block_too_early(patch: pytest.MonkeyPatch) -> None:
    """A block that is not full yet enters the tree."""
    commit = KVCacheManager.commit

    def planted(manager: KVCacheManager, table: BlockTable, tokens: list[int], num_computed: int) -> None:
        end = min(num_computed + manager.block_size, len(tokens), table.num_blocks * manager.block_size)
        commit(manager, table, tokens, end)

    patch.setattr(KVCacheManager, "commit", planted)


def share_under_any_salt(patch: pytest.MonkeyPatch) -> None:
    find, insert, child = PrefixTree.find, PrefixTree.insert, PrefixTree.child
    patch.setattr(PrefixTree, "find", lambda tree, tokens, limit, salt: find(tree, tokens, limit, b""))
    patch.setattr(PrefixTree, "insert", lambda tree, node, key, salt: insert(tree, node, key, b""))
    patch.setattr(PrefixTree, "child", lambda tree, node, key, salt: child(tree, node, key, b""))


PLANTED = [
    hand_out_a_block_twice,
    cache_without_holding,
    evict_what_is_in_use,
    drop_the_copies,
    cache_one_block_too_early,
    share_under_any_salt,
]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_makes_the_schedules_fail(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    monkeypatch.setattr(KVCacheManager, "check_integrity", lambda manager: None)
    with pytest.raises(AssertionError):
        run_schedules(range(NUM_SCHEDULES))
