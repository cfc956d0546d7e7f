"""What docs/scheduling.md says of admission, preemption and forks, checked on every plan of a random schedule.

Computed anew from what sequences hold, not by asking the functions that decided.
"""

from __future__ import annotations

from octavo.core.plan import Admission, StepPlan
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


def owed_blocks(scheduler: Scheduler) -> int:
    """Blocks that running sequences still have to allocate for the tokens they know; -1: has one to spare."""
    size = scheduler.manager.block_size
    known = [(len(r.tokens) - r.num_drafted, r.table) for r in scheduler._running if r.table is not None]
    return sum(-(-num_tokens // size) - len(table) for num_tokens, table in known)


def check_plan(scheduler: WatchedScheduler, plan: StepPlan) -> None:
    if plan.preempted:
        assert not plan.admitted, "admitted in the step that preempted"
        return
    check_waiting(scheduler, plan)
    for at, admission in enumerate(plan.admitted):
        check_admission(scheduler, admission, [a.request_id for a in plan.admitted[:at]])
    if plan.admitted:
        reserve = len(scheduler._running) - 1  # one block for each that ran when the last one joined
        # an idle block that is copied from is held until the step is over
        room = scheduler.manager.num_available + len(plan.block_copies)
        assert owed_blocks(scheduler) + reserve <= room, (
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
    idle = sum(manager._pool.refs(block) == 1 for block in match.blocks)
    needed = -(-len(seq.tokens) // manager.block_size) - len(match.blocks)
    room = manager.num_available - idle - owed_blocks(scheduler) - len(scheduler._running)
    assert needed > room, f"waits for memory although it needs {needed} blocks and has room for {room}"


def check_admission(scheduler: Scheduler, admission: Admission, earlier: list[str]) -> None:
    seq = scheduler._sequences[admission.request_id]
    assert admission.cached_tokens < len(seq.tokens), "the last known token came from the cache"
    assert admission.miss_reason != "in flight", "computes what a running sequence is computing"
    siblings = running_siblings(scheduler, seq)
    before = [s for s in siblings if s.admitted_step < seq.admitted_step or s.request_id in earlier]
    if before and not seq.num_preemptions and seq.next_prompt_logprob >= seq.prompt_len:
        assert admission.miss_reason == "forked", "computes the prompt beside one of its family"
        assert admission.cached_tokens == seq.prompt_len - 1, "does not share all of the prompt that has KV"


def running_siblings(scheduler: Scheduler, seq: Sequence) -> list[Sequence]:
    return [other for other in scheduler._groups[seq.group] if other is not seq and other.table is not None]
