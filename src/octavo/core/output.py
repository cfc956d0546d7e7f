"""What a caller gets back."""

from __future__ import annotations

from collections.abc import Sequence
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


def join_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Consecutive news of one sequence as one. outputs: at least one."""
    first, last = outputs[0], outputs[-1]
    if first is last:
        return first
    with_logprobs = [output.logprobs for output in outputs if output.logprobs is not None]
    of_prompt = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    return RequestOutput(
        request_id=first.request_id,
        choice_index=first.choice_index,
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(token for tokens in with_logprobs for token in tokens) if with_logprobs else None,
        prompt_logprobs=tuple(token for tokens in of_prompt for token in tokens) if of_prompt else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        failure=last.failure,
        usage=last.usage,
        timings=last.timings,
    )
