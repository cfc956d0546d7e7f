"""Who joins those that run."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping

from octavo.core.plan import Admission, ChunkReason, WaitReason
from octavo.memory.block_table import BlockTable
from octavo.memory.kv_cache_manager import KVCacheManager
from octavo.memory.prefix_tree import Match
from octavo.scheduler.chunk_sizer import StepBudget
from octavo.scheduler.draft import Draft
from octavo.scheduler.policy import QueuePolicy, by_rank
from octavo.scheduler.sequence import Sequence

#: What only another sequence can bring, so that those behind may go first.
WAITS_FOR_ANOTHER = ("shared_prefix_in_flight", "fork_parent")


class AdmissionControl:
    """Takes requests from the queue into the running batch, in policy order, while there is room.

    It works on the scheduler's books: ``running``, sorted by rank, to which it adds, and ``groups``, forks of one
    prompt in order of arrival.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        policy: QueuePolicy,
        running: list[Sequence],
        groups: Mapping[str, list[Sequence]],
        *,
        max_num_seqs: int,
    ) -> None:
        self._manager = manager
        self._policy = policy
        self._running = running
        self._groups = groups
        self._max_num_seqs = max_num_seqs
        self._short: tuple[Sequence, tuple[int, ...]] | None = None  # who did not fit, and the room there was for it
        self._held_up: Sequence | None = None  # the queue's head, if nothing but the token budget keeps it waiting
        self._stopped_s = float("-inf")  # when admission last stopped for another reason

    def head_waits_since(self) -> list[float]:
        """When the queue's head began to wait for nothing but the token budget; [] if it waits for anything else."""
        if self._held_up is None:
            return []
        return [max(self._held_up.held_up_since_s, self._stopped_s)]

    def stop(self, now: float) -> None:
        """Nobody can join, for want of something other than the token budget."""
        self._stopped_s = now

    def ended(self, seq: Sequence) -> None:
        """``seq`` is not there any more."""
        if self._held_up is seq:
            self._held_up = None

    def forget(self) -> None:
        """All of them have changed."""
        self._short = self._held_up = None

    def admit(self, draft: Draft, budget: StepBudget) -> None:
        """Admit waiting requests in policy order, until one has to wait for a resource.

        Nobody overtakes that one: a large request would starve behind small ones that always fit.
        """
        self._held_up = None
        for seq in self._policy.candidates():
            why = self._try_admit(seq, draft, budget) if len(self._running) < self._max_num_seqs else "max_num_seqs"
            if why is None:
                continue
            draft.waiting_for[seq.request_id] = why
            if why in WAITS_FOR_ANOTHER:
                seq.held_up_since_s = draft.now
                continue
            if why == "budget":
                self._held_up = seq
            else:
                self.stop(draft.now)
            return

    def cut(self, table: BlockTable, wanted: int, reason: ChunkReason) -> tuple[int, ChunkReason]:
        """A chunk of ``wanted`` tokens, shorter if a state has to be kept before its end."""
        num_tokens = self._manager.cut(table, table.num_computed + wanted) - table.num_computed
        return (num_tokens, reason) if num_tokens == wanted else (num_tokens, "snapshot")

    def _try_admit(self, seq: Sequence, draft: Draft, budget: StepBudget) -> WaitReason | None:
        """Admit ``seq`` with its first chunk -> None, or why not."""
        manager, length = self._manager, len(seq.tokens)
        room = manager.room_beside([(r.table, len(r.tokens)) for r in self._running if r.table is not None])
        if self._short is not None and self._short[0] is seq and manager.has_one_full_group and room <= self._short[1]:
            return "memory"  # no room was gained since it last did not fit: spare the lookup
        match = self._match(seq, draft.step_id)
        if isinstance(match, str):
            return match
        if not manager.fits(match, length, room):
            self._short = (seq, room)
            return "memory"
        wanted, _ = budget.allow(match.num_tokens, length - match.num_tokens)
        if wanted <= 0:
            return "budget"
        self._short = None
        seq.table, cached = manager.open(match, seq.tokens, seq.capacity_tokens, seq.request.cache_salt)
        wanted, reason = budget.allow(cached, length - cached)  # cached: less than matched if there was no room to copy
        wanted, reason = self.cut(seq.table, max(wanted, 1), reason)
        num_tokens = manager.grow(seq.table, cached + wanted) - cached
        assert num_tokens > 0, "an admitted sequence has no block for its first token"
        budget.spend(cached, num_tokens)
        self._policy.remove(seq)
        insort(self._running, seq, key=by_rank)
        draft.place(seq, num_tokens, reason if num_tokens == wanted else "memory")
        seq.num_computed = cached
        seq.admitted_step = draft.step_id
        if seq.cached_tokens is None:
            seq.cached_tokens = cached
            self._policy.admitted(seq, length - cached)
        if match.reason not in ("forked", "prompt logprobs", "off"):
            manager.count_lookup(seq.lookup_limit, cached)
        facts = {**match.facts, "preemptions": seq.num_preemptions}
        draft.admitted.append(
            Admission(request_id=seq.request_id, cached_tokens=cached, miss_reason=match.reason, facts=facts)
        )
        return None

    def _match(self, seq: Sequence, step_id: int) -> Match | WaitReason:
        """What ``seq`` can share, or what it has to wait for."""
        if seq.awaiting is not None:
            if self._manager.is_in_flight(seq.awaiting):
                return "shared_prefix_in_flight"
            seq.awaiting = None
        limit, prompt_computed = seq.lookup_limit, seq.prompt_len - 1
        if limit == 0 and seq.next_prompt_logprob < seq.prompt_len:
            return Match(reason="prompt logprobs")
        forked: Match | None = None
        if limit >= prompt_computed:
            siblings = [(other, other.table) for other in self._groups[seq.group] if other.table is not None]
            ready = [t for o, t in siblings if o.num_computed >= prompt_computed and o.admitted_step != step_id]
            if not ready and siblings and not seq.num_preemptions:
                return "fork_parent"
            forks = (self._manager.fork(table, prompt_computed) for table in ready)
            forked = next((fork for fork in forks if fork is not None), None)
            if forked is not None and limit == prompt_computed:
                return forked
        match = self._manager.lookup(seq.tokens, limit, seq.request.cache_salt)
        if forked is not None and match.num_tokens < prompt_computed:
            return forked
        if match.reason == "in flight":
            seq.awaiting = match.next_hash
            return "shared_prefix_in_flight"
        return match
