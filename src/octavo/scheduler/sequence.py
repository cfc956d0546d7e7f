"""One request's progress. Only the scheduler writes here."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from octavo.core.plan import ChunkReason, DrawFailure, DrawRule, FinishReason, ScheduledChunk, WantedLogprobs
from octavo.core.request import Request
from octavo.memory.block_table import BlockTable

SequenceState = Literal["waiting", "running", "preempted"]


class Sequence:
    """Known tokens and how far their KV is computed. Running if and only if it has a block table.

    ```
    tokens   0 ............ num_computed ............ num_tokens
             KV in the blocks       still to run; the last one's logits draw the next
    ```
    """

    __slots__ = (
        "admitted_step", "awaiting", "cached_tokens", "draw_rule", "draws", "held_up_since_s", "longest",
        "min_tokens", "next_prompt_logprob", "num_computed", "num_drafted", "num_preemptions", "prepaid",
        "prompt_len", "rank", "request", "request_id", "sampling", "stop_token_ids", "table", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request) -> None:
        self.request = request
        known = request.known_output.token_ids if request.known_output is not None else ()
        self.tokens: list[int] = [*request.prompt_token_ids, *known]
        self.prompt_len = len(request.prompt_token_ids)
        self.num_computed = 0
        self.num_drafted = 0  # the last tokens, which are guesses while a step checks them
        self.table: BlockTable | None = None
        self.admitted_step = -1  # step of the latest admission
        self.cached_tokens: int | None = None  # what the first admission found; None before it
        self.num_preemptions = 0
        self.awaiting: int | None = None  # hash of a block that a running sequence will bring
        self.rank: tuple[float, int] = (0.0, 0)  # place in the policy's order; the policy writes it
        self.prepaid = 0  # output tokens charged beforehand; "fair" writes it
        self.held_up_since_s = request.arrival_s  # since when only the token budget holds it up
        # of the request, looked up every step
        self.request_id = request.request_id
        self.sampling = sampling = request.sampling
        self.stop_token_ids = request.stop_token_ids
        self.draws = request.max_tokens > 0
        self.longest = self.prompt_len + request.max_tokens
        self.min_tokens = sampling.min_tokens
        rule = DrawRule(
            params=sampling,
            random_stream=request.random_stream,
            history=self.tokens if sampling.needs_history or request.grammar is not None else (),
            prompt_len=self.prompt_len,
        )
        if self.min_tokens > len(known):
            later = (self.prompt_len + self.min_tokens, rule)
            rule = replace(rule, banned_token_ids=tuple(sorted(self.stop_token_ids)), later=later)
        self.draw_rule = rule
        # first position whose prompt logprob is still owed; prompt_len: none
        owes_logprobs = sampling.prompt_logprobs is not None and not known
        self.next_prompt_logprob = 1 if owes_logprobs else self.prompt_len

    @property
    def group(self) -> str:
        """Forks of one prompt share it."""
        return self.request.fork_of or self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Positions to run before the next token can be drawn."""
        return len(self.tokens) - self.num_computed

    @property
    def capacity_tokens(self) -> int:
        """Positions that can ever be run: the last token drawn never is."""
        return max(self.longest - 1, self.prompt_len)

    @property
    def lookup_limit(self) -> int:
        """Positions that may come from a cache: the last one is always run, and owed prompt logprobs need theirs."""
        limit = len(self.tokens) - 1
        return limit if self.next_prompt_logprob >= self.prompt_len else min(limit, self.next_prompt_logprob - 1)

    @property
    def state(self) -> SequenceState:
        if self.table is not None:
            return "running"
        return "preempted" if self.num_preemptions else "waiting"

    def chunk(self, num_tokens: int, reason: ChunkReason) -> ScheduledChunk:
        """The record of its next ``num_tokens`` positions. Views the table and the history, copies neither."""
        assert self.table is not None
        tokens, start = self.tokens, self.num_computed
        end = start + num_tokens
        chunk = ScheduledChunk(  # without keywords: see hot_record
            self.request_id,
            start,
            (tokens[start],) if num_tokens == 1 else tokens[start:end],
            self.table.views,
            self.draw_rule if self.draws and end == len(tokens) else None,
            reason,
        )
        if self.next_prompt_logprob < self.prompt_len:
            owed = range(max(start + 1, self.next_prompt_logprob), min(end + 1, self.prompt_len))
            if owed:
                tokens_there, count = tokens[owed.start : owed.stop], self.sampling.prompt_logprobs or 0
                wanted = WantedLogprobs(positions=owed, token_ids=tokens_there, num_alternatives=count)
                chunk = replace(chunk, want_logprobs=wanted)
        return replace(chunk, draw_positions=range(start, end)) if self.num_drafted else chunk

    def append(self, token_id: int) -> tuple[FinishReason | None, int | None]:
        """One more output token -> (finish reason, the caller's stop token), None and None if it goes on."""
        tokens = self.tokens
        tokens.append(token_id)
        if self.min_tokens and self.num_output == self.min_tokens:
            self.draw_rule = self.draw_rule.for_position(len(tokens))
        if token_id in self.stop_token_ids and self.num_output >= self.min_tokens:
            return "stop", token_id if token_id in self.sampling.stop_token_ids else None
        return ("length" if len(tokens) >= self.longest else None), None

    def draft(self, token_ids: list[int]) -> None:
        """These may follow. Until ``take_back`` they stand among its tokens, where draws look for their history."""
        self.num_drafted = len(token_ids)
        self.tokens += token_ids

    def take_back(self) -> list[int]:
        """The drafted tokens, which are none of its own any more."""
        known = len(self.tokens) - self.num_drafted
        drafted, self.num_drafted = self.tokens[known:], 0
        del self.tokens[known:]
        return drafted

    def restart(self) -> None:
        """Forget its blocks, which are gone, and what it waited for; its tokens stay."""
        self.take_back()
        self.num_preemptions += self.table is not None
        self.table = self.awaiting = None
        self.num_computed = self.prepaid = 0

    def why_no_token(self, failure: DrawFailure, error: str | None) -> str:
        """What the caller is told. error: what its matcher raised."""
        if failure == "not_finite":
            return "no token could be drawn: the logits are not finite"
        if failure == "matcher_raised":
            return f"the grammar's matcher failed after {self.num_output} tokens: {error}"
        masks = " and ".join((*self.sampling.masks, *(["grammar"] if self.request.grammar else []))) or "its masks"
        return f"{masks} left no token to draw after {self.num_output} tokens; allow more tokens or forbid fewer"
