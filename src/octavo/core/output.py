"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.plan import DrawFailure, FinishReason, SampledToken
from octavo.core.records import hot_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one sequence."""

    prompt_tokens: int
    completion_tokens: int  # drawn: the one that ended it and those that a stop string cut count too
    cached_tokens: int  # prompt tokens whose KV was not computed again


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Durations of one finished request, in seconds; None where the request ended before that point."""

    queue_s: float | None  # arrival to admission
    ttft_s: float | None  # arrival to first token
    tpot_s: float | None  # mean time per output token after the first
    total_s: float  # arrival to end


@hot_record
class RequestOutput:
    """News of one sequence: what is new since the last one, and on the last one how it ended."""

    request_id: str
    choice_index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[SampledToken, ...] | None = None  # one per id in token_ids, when asked for
    prompt_logprobs: tuple[SampledToken, ...] | None = None  # of prompt positions 1, 2, ..., on the first output
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    failure: DrawFailure | None = None  # with "error": which draw failed, if one did
    usage: Usage | None = None  # on the last output
    timings: Timings | None = None  # on the last output
