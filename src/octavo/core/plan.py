"""What one step will run and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from octavo.core.records import hot_record
from octavo.core.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
#: Why a draw gave no token: numbers that nobody should trust, masks of the request that leave nothing, or its matcher.
DrawFailure = Literal["not_finite", "no_token_left", "matcher_raised"]
#: Why a chunk is as long as it is; of a budget, why it is no larger.
ChunkReason = Literal[
    "decode",
    "verify",  # a decode with drafted tokens behind it
    "last piece",  # all that was left
    "budget",  # max_num_batched_tokens, or the fixed sizer's chunk_size
    "memory",
    "target_itl",
    "queue depth",  # that, less what a deep queue leaves to decodes
    "max_prefill_wait_s",  # that, more since somebody has waited for long
    "max_step",  # a second, with nobody decoding
    "no decodes",
    "ramp",  # no further than what has been measured
    "floor",  # one block, however long it takes
    "snapshot",  # up to where a recurrent state is kept for later prompts
]
#: Why a waiting request is not admitted. The first two wait for a running sequence.
WaitReason = Literal["shared_prefix_in_flight", "fork_parent", "memory", "budget", "max_num_seqs"]
#: Why a lookup in the prefix tree ended where it did.
MissReason = Literal[
    "end of prompt",
    "diverged",
    "evicted",
    "in flight",
    "never seen",
    "forked",
    "prompt logprobs",
    "off",
    "window given back",  # more is cached of the full layers, but not what a window would see there
    "no snapshot",  # the same of a recurrent state
]


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class DrawRule:
    """What a sequence's draws are a pure function of, besides their logits and positions.

    A sequence keeps one as long as nothing in it changes, so that a backend may remember what it made of it, as
    long as that rule (or its ``params``) lives: both take weak references.
    """

    params: SamplingParams
    random_stream: int  # Request.random_stream, 64 bits
    history: Sequence[int] = ()  # all tokens that there are, growing, if its draws depend on them
    prompt_len: int = 0
    banned_token_ids: tuple[int, ...] = ()  # stop tokens while fewer than min_tokens are out
    later: tuple[int, DrawRule] | None = None  # from that position on another rule holds

    def for_position(self, position: int) -> DrawRule:
        """The rule of the draw of the token at ``position``."""
        return self if self.later is None or position < self.later[0] else self.later[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedLogprobs:
    """Prompt logprobs that a chunk owes: at positions p, given [0, p). Each p - 1 lies in the chunk."""

    positions: range
    token_ids: Sequence[int]  # at these positions
    num_alternatives: int


@hot_record
class ScheduledChunk:
    """Run positions ``[start, start + len(token_ids))`` of one sequence. There is no prefill/decode flag."""

    request_id: str
    start: int
    token_ids: Sequence[int]  # of the positions to run
    #: Buffers of int32, one per cache group, valid until apply(): a block table's head that covers [0, end), -1 where a
    #: window group has given a block back; of a state group, the slots to read (-1: none yet) and to write.
    block_tables: Sequence[Sequence[int]]
    draw: DrawRule | None = None  # of its draws, if a token is wanted
    reason: ChunkReason = "decode"
    want_logprobs: WantedLogprobs | None = None
    draw_positions: range | None = None  # whose logits draw, each the token after it; None: the last one's alone

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """Whether it runs the one token that its sequence drew last."""
        return self.reason == "decode"

    @property
    def drawing(self) -> range:
        """Positions of the chunk from whose logits a token is drawn."""
        if self.draw is None:
            return range(0)
        return self.draw_positions if self.draw_positions is not None else range(self.end - 1, self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetFacts:
    """How the prefill budget of a step came to be."""

    tokens: int  # prefill tokens allowed
    reason: ChunkReason
    predicted_s: float | None = None  # predicted length of the step, when a cost model has one
    target_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """One request that left the queue in this step."""

    request_id: str
    cached_tokens: int  # positions whose KV the prefix tree (or a fork's parent) gave
    miss_reason: MissReason
    facts: Mapping[str, object] = field(default_factory=dict)


@hot_record
class StepPlan:
    """One pass of the engine. One-token chunks come first."""

    step_id: int
    chunks: tuple[ScheduledChunk, ...]
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[str, ...] = ()
    waiting_for: Mapping[str, WaitReason] = field(default_factory=dict)  # waiting request -> why it was not admitted
    evicted: int = 0  # cached blocks that lost their content to this step
    budget: BudgetFacts | None = None
    block_copies: tuple[tuple[int, int, int, int], ...] = ()  # (group, src, dst, num_tokens), before any KV write
    failed: tuple[tuple[str, str], ...] = ()  # (request_id, why): can never run; finished with "error"
    num_waiting: int = 0
    num_running: int = 0
    free_blocks: int = 0  # in the cache group that has fewest


@hot_record
class SampledToken:
    """One token with its log-probability under the raw logits (natural log)."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # likeliest first, ties to the lowest id


@hot_record
class StepResult:
    """What the runner returns, one entry per chunk of the plan."""

    step_id: int
    tokens: tuple[tuple[SampledToken, ...], ...]  # of its draws, in order, up to the first that failed
    prompt_logprobs: tuple[
        tuple[SampledToken, ...], ...
    ] = ()  # per chunk, of its want_logprobs; () if none asked at all
    failed: Mapping[int, DrawFailure] = field(default_factory=dict)  # chunk -> why it failed: its request does, alone
    errors: Mapping[int, str] = field(default_factory=dict)  # chunk -> what its matcher raised
    build_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    gil_wait_s: float = 0.0  # of build_s: the way back from the kernels into Python, while other threads run Python

    @property
    def duration_s(self) -> float:
        return self.build_s + self.forward_s + self.sample_s


@hot_record
class TokenEvent:
    """What a step meant for one request: a token, prompt logprobs, an end, or several of these. One for each token."""

    request_id: str
    token: SampledToken | None = None
    prompt_logprobs: tuple[SampledToken, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or string, or what went wrong
    failure: DrawFailure | None = None  # with "error": whose fault, if a draw failed
