"""The scheduler: one plan per step, made of pure decisions. ``docs/scheduling.md`` states its rules."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as AnySequence

from octavo.core.cache_group import FULL, CacheGroup
from octavo.core.config import EngineConfig
from octavo.core.errors import InvalidRequest, PromptTooLong
from octavo.core.plan import (
    ChunkReason,
    DrawFailure,
    FinishReason,
    SampledToken,
    StepPlan,
    StepResult,
    TokenEvent,
)
from octavo.core.request import Request
from octavo.memory.kv_cache_manager import KVCacheManager
from octavo.scheduler.admission import AdmissionControl
from octavo.scheduler.chunk_sizer import ChunkSizer, FixedChunkSizer, StepBudget, StepSituation, make_sizer
from octavo.scheduler.cost_model import StepLoad
from octavo.scheduler.draft import DECODE, Draft, OpenStep
from octavo.scheduler.policy import FcfsPolicy, QueuePolicy, make_policy
from octavo.scheduler.sequence import Sequence
from octavo.scheduler.speculation import Drafter, place_drafts


class Scheduler:
    """Owns all sequences and, through its ``manager``, all KV blocks.

    The engine calls ``plan``, runs it, then ``apply`` (or ``fail_step``), with nothing in between; ``add`` and
    ``finish`` come between steps. Calling out of turn raises ``RuntimeError``. Time is only ever what ``plan`` is given
    and what a ``StepResult`` reports, so a recorded workload replays to the same decisions.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        policy: QueuePolicy | None = None,
        sizer: ChunkSizer | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        max_prefill_wait_s: float = 5.0,
    ) -> None:
        """max_num_batched_tokens: positions per step; max_model_len: prompt plus output, None: what the pool holds."""
        self.manager = manager
        self._policy = policy or FcfsPolicy()
        self._sizer = sizer or FixedChunkSizer(512)
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._max_prefill_wait_s = max_prefill_wait_s
        self.drafter: Drafter | None = None
        self._commits_every_step = manager.commits_every_step
        self._sequences: dict[str, Sequence] = {}
        self._groups: dict[str, list[Sequence]] = {}  # forks of one prompt, in order of arrival
        self._running: list[Sequence] = []  # sorted by rank: the policy's order
        self._impossible: dict[str, str] = {}  # request -> why it can never run
        self._step_id = 0
        self._open: OpenStep | None = None
        self._admission = AdmissionControl(
            manager, self._policy, self._running, self._groups, max_num_seqs=max_num_seqs
        )

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        num_blocks: int | AnySequence[int],
        max_model_len: int,
        groups: AnySequence[CacheGroup] = (FULL,),
    ) -> Scheduler:
        """The scheduler that ``config`` wishes for, over ``num_blocks`` blocks of each of the model's cache groups."""
        size = config.block_size
        return cls(
            KVCacheManager(num_blocks, size, groups=groups, enable_prefix_caching=config.enable_prefix_caching),
            policy=make_policy(config.policy, aging_s=config.aging_s, quantum=size),
            sizer=make_sizer(config),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            max_prefill_wait_s=config.max_prefill_wait_s,
        )

    # Requests in and out, between steps

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences or self._impossible)

    @property
    def num_waiting(self) -> int:
        return self._policy.num_waiting

    @property
    def num_running(self) -> int:
        return len(self._running)

    def sequences(self) -> tuple[Sequence, ...]:
        """Every unfinished sequence, in order of arrival: to look at between two steps."""
        return tuple(self._sequences.values())

    def add(self, request: Request) -> None:
        """Queue a request. One that no pool state could ever satisfy ends with the next plan (``StepPlan.failed``)."""
        self._check_between_steps("add")
        if request.request_id in self._sequences or request.request_id in self._impossible:
            raise InvalidRequest(f"request id {request.request_id!r} is in use; choose another")
        if not request.prompt_token_ids:
            raise InvalidRequest("the prompt is empty; it needs at least one token", param="prompt")
        length = len(request.prompt_token_ids) + request.max_tokens
        if self._max_model_len is not None and length > self._max_model_len:
            raise PromptTooLong(
                f"prompt and max_tokens make {length} tokens but max_model_len is {self._max_model_len}; "
                "shorten the prompt or lower max_tokens"
            )
        seq = Sequence(request)
        shortage = self.manager.shortage(seq.capacity_tokens)
        if shortage is not None:
            needed, there_are = shortage
            self._impossible[request.request_id] = (
                f"the request needs {needed} KV blocks but the pool has {there_are}; "
                "raise kv_cache_memory or lower max_tokens"
            )
            return
        group = self._groups.get(seq.group, [])
        for first in (member.request for member in group[:1]):
            if (first.prompt_token_ids, first.cache_salt) != (request.prompt_token_ids, request.cache_salt):
                raise InvalidRequest(f"fork {request.request_id!r} has another prompt or salt than {seq.group!r}")
        self._sequences[request.request_id] = seq
        self._groups[seq.group] = [*group, seq]
        self._policy.add(seq)

    def finish(
        self, request_id: str, finish_reason: FinishReason, stop_reason: int | str | None = None
    ) -> TokenEvent | None:
        """End a request from outside (abort, stop string). None if it is unknown or has ended already."""
        self._check_between_steps("finish")
        seq = self._sequences.get(request_id)
        if seq is not None:
            self._end(seq)
        elif self._impossible.pop(request_id, None) is None:
            return None
        return TokenEvent(request_id=request_id, finish_reason=finish_reason, stop_reason=stop_reason)

    # The step

    def plan(self, now: float) -> StepPlan:
        """Decide the next step. ``now``: seconds on the clock of ``Request.arrival_s``. No chunks: nothing to run."""
        self._check_between_steps("plan")
        self._step_id += 1
        evicted_before = self.manager.num_evicted
        failed = tuple(self._impossible.items())
        draft = Draft(self._step_id, now)
        self._place_decodes(draft)
        budget = self._begin_budget(draft)
        if budget is not None:
            self._place_prefills(draft, budget)
            if not draft.preempted:  # else there is no room, and the victim would be the first to return
                self._admission.admit(draft, budget)
        if self.drafter is not None and not self.manager.commits_every_step:
            place_drafts(self.drafter, draft, self.manager, self._max_num_batched_tokens)
        load = _load_of(draft.placed)
        prefill_tokens = 0 if budget is None else budget.spent
        placed = list(draft.placed.items())
        if prefill_tokens or self.drafter is not None:
            placed.sort(key=lambda item: item[1][0] > 1)
        sequences, chunks = [], []
        for seq, (num_tokens, reason) in placed:
            sequences.append(seq)
            chunks.append(seq.chunk(num_tokens, reason))
        plan = StepPlan(
            step_id=self._step_id,
            chunks=tuple(chunks),
            admitted=tuple(draft.admitted),
            preempted=tuple(draft.preempted),
            waiting_for=draft.waiting_for,
            evicted=self.manager.num_evicted - evicted_before,
            budget=None if budget is None else budget.facts(),
            block_copies=self.manager.take_copies(),
            failed=failed,
            num_waiting=self.num_waiting,
            num_running=len(self._running),
            free_blocks=self.manager.num_available,
        )
        self._open = OpenStep(plan, sequences, load, prefill_tokens)
        return plan

    def apply(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take in what came of ``plan``: commit blocks, append tokens, end what is done.

        Also for a plan without chunks. ``plan.failed`` and the chunks in ``result.failed`` end with "error".
        """
        step, events = self._close(plan)
        failed = result.failed
        for i, (seq, chunk, tokens) in enumerate(zip(step.sequences, plan.chunks, result.tokens, strict=True)):
            if seq.num_drafted:
                taken, next_failed = self._advance_drafted(seq, tokens)
                events += taken
                if not next_failed:
                    continue
                assert i in failed, f"the runner left out a draw of {seq.request_id!r} and did not call it failed"
            if failed and i in failed:
                why = seq.why_no_token(failed[i], result.errors.get(i))
                events.append(self._fail(seq.request_id, why, failed[i]))
                continue
            logprobs: tuple[SampledToken, ...] = ()
            if chunk.want_logprobs is not None:
                logprobs, seq.next_prompt_logprob = result.prompt_logprobs[i], chunk.want_logprobs.positions.stop
            event = self._advance(seq, len(chunk.token_ids), tokens[0] if tokens else None, logprobs)
            if event is not None:
                events.append(event)
        self.manager.end_step()
        if plan.chunks:
            self._sizer.observe(step.load, step.prefill_tokens, result.duration_s)
        return events

    def fail_step(self, plan: StepPlan, why: str) -> list[TokenEvent]:
        """Running ``plan`` raised: end the requests of its chunks with "error", commit nothing, go on with the rest."""
        _, events = self._close(plan)
        events += [self._fail(chunk.request_id, why) for chunk in plan.chunks]
        self.manager.end_step()
        return events

    def restart(self, lost: Collection[str] | None = None) -> Collection[str]:
        """After an error in here: empty books, without ``lost`` (None: all) -> ``lost``. Others keep their tokens."""
        lost = {*self._sequences, *self._impossible} if lost is None else lost
        survivors = [seq for request_id, seq in self._sequences.items() if request_id not in lost]
        for books in (self.manager, self._policy, self._sequences, self._groups, self._running):
            books.clear()
        self._impossible = {request_id: why for request_id, why in self._impossible.items() if request_id not in lost}
        self._open = None
        self._admission.forget()
        for seq in survivors:
            seq.restart()
            self._sequences[seq.request_id] = seq
            self._groups.setdefault(seq.group, []).append(seq)
            self._policy.add(seq)
        return lost

    # Planning: what runs already

    def _place_decodes(self, draft: Draft) -> None:
        """Give every running sequence that lacks only its last token its slot, in policy order."""
        left = self._max_num_batched_tokens
        for seq in tuple(self._running):
            table, end = seq.table, len(seq.tokens)
            if left == 0:
                break
            if table is None or seq.num_computed + 1 < end:
                continue  # preempted a moment ago, or in the middle of its prompt
            if table.covered >= end or self._make_room(seq, end, draft):
                draft.placed[seq] = DECODE
                left -= 1

    def _place_prefills(self, draft: Draft, budget: StepBudget) -> None:
        """Continue the chunks in progress, in policy order; but whoever got nothing for too long goes first."""
        late_s = draft.now - self._max_prefill_wait_s
        prefills = [seq for seq in self._running if seq not in draft.placed]
        prefills.sort(key=lambda seq: min(seq.held_up_since_s, late_s))
        for seq in prefills:
            if seq.table is None:
                continue  # preempted a moment ago
            start = seq.num_computed
            wanted, reason = budget.allow(start, seq.remaining)
            if wanted <= 0:
                break
            wanted, reason = self._admission.cut(seq.table, wanted, reason)
            num_tokens = self._make_room(seq, start + wanted, draft) - start
            if num_tokens <= 0:
                continue  # preempted itself
            budget.spend(start, num_tokens)
            draft.place(seq, num_tokens, reason if num_tokens == wanted else "memory")

    def _make_room(self, seq: Sequence, end: int, draft: Draft) -> int:
        """Blocks for positions ``[0, end)``, or for at least one that is not computed yet -> positions covered.

        Preempts until that is so; 0 if it was ``seq``'s turn to give way.
        """
        table = seq.table
        while table is not None:
            covered = self.manager.grow(table, end)
            if covered > seq.num_computed:
                return covered
            assert len(self._running) > 1, "a request that fits in the pool ran dry alone"
            self._preempt(self._policy.victim(self._running), draft)
            table = seq.table
        return 0

    def _preempt(self, victim: Sequence, draft: Draft) -> None:
        """Give up the victim's blocks and its place in this plan; its whole blocks stay cached while there is room."""
        draft.placed.pop(victim, None)
        assert victim.table is not None
        self.manager.release(victim.table)
        self._running.remove(victim)
        victim.table = None
        victim.num_computed = 0
        victim.num_preemptions += 1
        self._admission.stop(draft.now)  # nobody joins in this step, and the victim is the next in its class
        self._policy.requeue(victim)
        draft.preempted.append(victim.request_id)

    def _begin_budget(self, draft: Draft) -> StepBudget | None:
        """The prefill budget beside the decodes placed; None if there is nothing to prefill."""
        decodes = len(draft.placed)
        if decodes == len(self._running) and not self.num_waiting:
            return None
        waiting = [seq.held_up_since_s for seq in self._running if seq not in draft.placed]
        waiting += self._admission.head_waits_since()
        waited_s = draft.now - min(waiting, default=draft.now)
        return self._sizer.begin(
            StepSituation(
                decodes=_load_of(draft.placed),
                hard_limit=self._max_num_batched_tokens - decodes,
                spare_blocks=max(self.manager.num_available - decodes, 0),
                num_waiting=self.num_waiting,
                max_num_seqs=self._max_num_seqs,
                wait=waited_s / self._max_prefill_wait_s,
            )
        )

    # Applying

    def _advance_drafted(self, seq: Sequence, tokens: tuple[SampledToken, ...]) -> tuple[list[TokenEvent], bool]:
        """A chunk with drafted tokens has run -> what its draws mean, and whether the next to count is one that failed.

        Each draw is a step of its own: it counts if the sequence goes on and all drafted tokens before it were drawn.
        """
        drafted, events = seq.take_back(), list[TokenEvent]()
        for token, guess in zip(tokens, [*drafted, None], strict=False):
            event = self._advance(seq, 1, token, ())
            assert event is not None
            events.append(event)
            if event.finish_reason is not None or token.token_id != guess:
                return events, False
        return events, True

    def _advance(
        self, seq: Sequence, num_tokens: int, token: SampledToken | None, logprobs: tuple[SampledToken, ...]
    ) -> TokenEvent | None:
        """So many positions have run, and the last one's draw, if the next token was not known, gave ``token``."""
        start = seq.num_computed
        end = seq.num_computed = start + num_tokens
        size = self.manager.block_size
        if end // size > start // size or self._commits_every_step:
            assert seq.table is not None
            self.manager.commit(seq.table, seq.tokens, end)
        if end < len(seq.tokens):
            return TokenEvent(request_id=seq.request_id, prompt_logprobs=logprobs) if logprobs else None
        if seq.draws:
            assert token is not None, f"the runner drew no token for {seq.request_id!r} and did not call it failed"
            finish_reason, stop_reason = seq.append(token.token_id)
            self._policy.drew(seq)
        else:
            finish_reason, stop_reason = "length", None
        if finish_reason is not None:
            self._end(seq)
        return TokenEvent(seq.request_id, token, logprobs, finish_reason, stop_reason)

    def _end(self, seq: Sequence, *, suspect: bool = False) -> None:
        """Forget a sequence and give its blocks back; ``suspect`` ones leave the cache too."""
        if seq.table is None:
            self._policy.remove(seq)
        else:
            self.manager.release(seq.table, suspect=suspect)
            self._running.remove(seq)
            seq.table = None
        self._policy.ended(seq)
        self._admission.ended(seq)
        del self._sequences[seq.request_id]
        group = self._groups[seq.group]
        group.remove(seq)
        if not group:
            del self._groups[seq.group]

    def _fail(self, request_id: str, why: str, failure: DrawFailure | None = None) -> TokenEvent:
        self._end(self._sequences[request_id], suspect=failure == "not_finite")  # masks are only the caller's affair
        return TokenEvent(request_id, finish_reason="error", stop_reason=why, failure=failure)

    def _close(self, plan: StepPlan) -> tuple[OpenStep, list[TokenEvent]]:
        """``plan`` has run -> the step, and the events of requests that could never run."""
        step = self._open
        if step is None or plan is not step.plan:
            raise RuntimeError(f"step {plan.step_id} is not the plan being run; apply or fail each plan once")
        self._open = None
        return step, [TokenEvent(name, None, (), "error", self._impossible.pop(name)) for name, _ in plan.failed]

    def _check_between_steps(self, call: str) -> None:
        if self._open is not None:
            raise RuntimeError(f"{call}() inside step {self._open.plan.step_id}; apply or fail its plan first")


def _load_of(placed: dict[Sequence, tuple[int, ChunkReason]]) -> StepLoad:
    """The work in these chunks."""
    starts = [seq.num_computed for seq, (n, _) in placed.items() if n == 1]
    seen = sum(starts) + len(starts)  # a token sees itself too
    load = StepLoad(len(starts), seen, seen)
    if len(starts) < len(placed):
        for seq, (n, _) in placed.items():
            if n > 1:
                load = load.with_chunk(seq.num_computed, n)
    return load
