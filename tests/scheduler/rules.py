"""What docs/scheduling.md says of admission, preemption and forks, checked on every plan of a random schedule.

Computed anew from what sequences hold, not by asking the functions that decided.
"""

from __future__ import annotations

from octavo.core.plan import Admission, StepPlan
from octavo.memory.kv_cache_manager import KVCacheManager
from octavo.scheduler.chunk_sizer import AdaptiveChunkSizer
from octavo.scheduler.draft import Draft
from octavo.scheduler.policy import FairPolicy
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence

RESOURCES = ("memory", "budget", "max_num_seqs")


class WatchedScheduler(Scheduler):
    """A scheduler whose every plan and preemption must obey the rules."""

    paths_removed = False  # a request with bad numbers has taken its blocks out of the tree

    def _end(self, seq: Sequence, *, suspect: bool = False) -> None:
        super()._end(seq, suspect=suspect)
        self.paths_removed |= suspect

    def plan(self, now: float) -> StepPlan:
        plan = super().plan(now)
        check_plan(self, plan)
        return plan

    def _preempt(self, victim: Sequence, draft: Draft) -> None:
        running, nodes, known = list(self._running), self.manager.stats().nodes, list(victim.tokens)
        assert self.manager.num_available == 0, "preempted although a block could be had"
        assert victim is not running[0], "the first in policy order was preempted"
        assert victim is last_in_policy_order(self, running), "not the last in policy order was preempted"
        super()._preempt(victim, draft)
        assert victim.tokens == known, "a preempted sequence lost tokens"
        assert self.manager.stats().nodes == nodes, "what a preempted sequence had computed left the cache"
        assert victim not in draft.placed, "a preempted sequence kept its place in the plan"
        queue = self._policy._queue(victim)
        head = min(other.rank for other in queue if self._policy._same_class(other, victim))
        assert victim.rank == head, "a preempted sequence does not wait at the head of its class"


def last_in_policy_order(scheduler: Scheduler, running: list[Sequence]) -> Sequence:
    policy = scheduler._policy
    # of equal ranks, which one preempted and one running sequence can have, the later to be admitted is behind
    order = sorted(running, key=lambda seq: seq.rank)
    if not isinstance(policy, FairPolicy):
        return order[-1]

    def ahead(seq: Sequence) -> int:
        return -policy._clients[seq.request.client].deficit

    return max(enumerate(order[1:]), key=lambda item: (ahead(item[1]), item[0]))[1]


def most_blocks(manager: KVCacheManager, group: int, num_tokens: int) -> int:
    """Blocks of a group that a sequence needs at most to run all its tokens, a block of positions or less at a time."""
    size, spec = manager.block_size, manager.groups[group]
    if spec.kind == "state":
        return 2
    positions = range(num_tokens)
    if spec.kind == "full":
        return len({p // size for p in positions})
    spans = [{p // size for p in range(max(0, start - spec.window), start + size)} for start in range(size)]
    far = [{p // size for p in range(start - spec.window, start + size)} for start in range(10 * size, 11 * size)]
    return min(len({p // size for p in positions}), max(map(len, spans + far)))


def owed_blocks(scheduler: Scheduler, group: int, *, after_step: bool) -> int:
    """Blocks that running sequences still have to allocate for the tokens they know; -1: has one to spare.

    after_step: less those of a window group that a long chunk has beyond its window, for this step alone.
    """
    running = [(r.table, len(r.tokens) - r.num_drafted) for r in scheduler._running if r.table is not None]
    owed = [most_blocks(scheduler.manager, group, length) - len(table.rows[group].held) for table, length in running]
    return sum(owed) if after_step else sum(max(blocks, 0) for blocks in owed)


def check_plan(scheduler: WatchedScheduler, plan: StepPlan) -> None:
    if plan.preempted:
        assert not plan.admitted, "admitted in the step that preempted"
        return
    check_waiting(scheduler, plan)
    for at, admission in enumerate(plan.admitted):
        check_admission(scheduler, admission, [a.request_id for a in plan.admitted[:at]])
    if plan.admitted:
        reserve = len(scheduler._running) - 1  # one block for each that ran when the last one joined
        for group, blocks in enumerate(scheduler.manager._blocks):
            # an idle block that is copied from is held until the step is over
            room = blocks.num_available + sum(copy[0] == group for copy in plan.block_copies)
            assert owed_blocks(scheduler, group, after_step=True) + reserve <= room, (
                "admitted without room for all that running sequences will need"
            )


def check_waiting(scheduler: WatchedScheduler, plan: StepPlan) -> None:
    reasons = list(plan.waiting_for.values())
    lacking = [reason for reason in reasons if reason in RESOURCES]
    assert lacking in ([], reasons[-1:]), f"somebody was looked at behind one who lacks {lacking}"
    assert lacking or len(reasons) == scheduler.num_waiting, "nobody lacks a resource, and yet not all were looked at"
    for request_id, reason in plan.waiting_for.items():
        seq = scheduler._sequences[request_id]
        if reason == "max_num_seqs":
            assert len(scheduler._running) == scheduler._max_num_seqs, "waits for a sequence although one is free"
        elif reason == "budget" and not isinstance(scheduler._sizer, AdaptiveChunkSizer):
            assert plan.budget is not None
            run = sum(len(chunk.token_ids) for chunk in plan.chunks if chunk.reason not in ("decode", "verify"))
            assert run == plan.budget.tokens, "waits for budget although some is left"
        elif reason == "memory":
            check_memory_wait(scheduler, seq)
        elif reason == "shared_prefix_in_flight":
            owner = scheduler.manager._in_flight.get(seq.awaiting or 0)
            assert any(r.table is owner for r in scheduler._running), "waits for a block that nobody will compute"
        elif reason == "fork_parent":
            running = running_siblings(scheduler, seq)
            assert running, "waits for a family of which nobody runs"
            ready = [r for r in running if r.num_computed >= seq.prompt_len - 1 and r.admitted_step < plan.step_id]
            assert not ready, "waits although one of its family has computed the prompt"


def check_memory_wait(scheduler: WatchedScheduler, seq: Sequence) -> None:
    """It really does not fit beside what runs.

    After a failure that may be wrong for a while: a twin that runs on brings a removed path back whole, and as no room
    was gained, the head of the queue is not looked up again.
    """
    manager = scheduler.manager
    if len(scheduler._groups[seq.group]) > 1 or seq.next_prompt_logprob < seq.prompt_len:
        return  # (a fork may share blocks that the tree does not have)
    if scheduler.paths_removed:
        return
    match = manager.lookup(seq.tokens, len(seq.tokens) - 1, seq.request.cache_salt)
    lacking = []
    for group, blocks in enumerate(manager._blocks):
        shared = [block for block in match.blocks[group] if block >= 0] if match.blocks else []
        idle = sum(blocks.pool.refs(block) == 1 for block in shared)
        needed = most_blocks(manager, group, len(seq.tokens)) - len(shared)
        room = blocks.num_available - idle - owed_blocks(scheduler, group, after_step=False) - len(scheduler._running)
        lacking.append(needed > room)
    assert any(lacking), "waits for memory although all groups have room"


def check_admission(scheduler: Scheduler, admission: Admission, earlier: list[str]) -> None:
    seq = scheduler._sequences[admission.request_id]
    assert admission.cached_tokens < len(seq.tokens), "the last known token came from the cache"
    assert admission.miss_reason != "in flight", "computes what a running sequence is computing"
    siblings = running_siblings(scheduler, seq)
    before = [s for s in siblings if s.admitted_step < seq.admitted_step or s.request_id in earlier]
    able = [s for s in before if can_serve(scheduler.manager, s, seq.prompt_len - 1)]
    ready = [s for s in able if s.num_computed >= seq.prompt_len - 1 and s.admitted_step < seq.admitted_step]
    must_share = ready or (before and len(able) == len(before))  # (of those who cannot any more, nobody is waited for)
    if must_share and not seq.num_preemptions and seq.next_prompt_logprob >= seq.prompt_len:
        assert admission.miss_reason == "forked", "computes the prompt beside one of its family"
        assert admission.cached_tokens == seq.prompt_len - 1, "does not share all of the prompt that has KV"


def can_serve(manager: KVCacheManager, sibling: Sequence, position: int) -> bool:
    """Whether it still has everything that a fork needs who goes on at ``position``."""
    assert sibling.table is not None
    needed = [max(0, position - g.window + 1) if g.kind == "window" else 0 for g in manager.groups]
    first = [getattr(row, "first", None) for row in sibling.table.rows]  # (a state has none)
    return all(has is not None and has * manager.block_size <= need for has, need in zip(first, needed, strict=True))


def running_siblings(scheduler: Scheduler, seq: Sequence) -> list[Sequence]:
    return [other for other in scheduler._groups[seq.group] if other is not seq and other.table is not None]
