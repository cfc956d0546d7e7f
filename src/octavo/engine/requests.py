"""Submission: check a request against the model, resolve what it left open, make its n sequences."""

from __future__ import annotations

import dataclasses
import operator
import secrets
from collections.abc import Sequence
from functools import lru_cache

from octavo.core.config import ResolvedConfig
from octavo.core.errors import InvalidRequest, PromptTooLong
from octavo.core.limits import MAX_N
from octavo.core.request import Request, Submission
from octavo.core.sampling_params import SamplingParams
from octavo.text.grammar import maker_of


def make_requests(config: ResolvedConfig, submission: Submission, *, arrival_s: float) -> list[Request]:
    """The n sequences of one call; all but the first are forks of the first.

    Raises InvalidRequest or PromptTooLong if the model cannot serve it as written. Without ``max_tokens`` the output
    may take what is left of the context; without ``seed`` one is drawn from the OS and kept.
    """
    sampling, n, priority = submission.sampling, submission.n, submission.priority
    prompt = _checked_prompt(config, submission.prompt_token_ids)
    sampling.check_token_ids(config.vocab_size)
    if not 1 <= n <= MAX_N:
        raise InvalidRequest(f"n is {n} but must be from 1 to {MAX_N}", param="n")
    if not -(2**31) <= priority < 2**31:
        raise InvalidRequest(f"priority is {priority} but must fit 32 bits", param="priority")
    room = config.max_model_len - len(prompt)
    max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
    if max_tokens > room:
        raise PromptTooLong(
            f"This model's maximum context length is {config.max_model_len} tokens, but prompt ({len(prompt)}) and "
            f"max_tokens ({max_tokens}) need {len(prompt) + max_tokens}; shorten one or raise --max-model-len",
            param="max_tokens",
        )
    if sampling.max_tokens is None and room < 1:
        raise _too_long(config, len(prompt))
    if sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {sampling.min_tokens} but only {max_tokens} tokens may follow the prompt",
            param="min_tokens",
        )
    _check_known_output(config, submission, max_tokens)
    if submission.grammar is not None:
        maker_of(submission.grammar)
    stops = _stop_ids(sampling.stop_token_ids, frozenset() if sampling.ignore_eos else config.eos_token_ids)
    _check_masks(sampling, stops)
    # one record for all of them: what follows from it is worked out once
    of_forks = sampling if sampling.prompt_logprobs is None else dataclasses.replace(sampling, prompt_logprobs=None)
    seed = (sampling.seed if sampling.seed is not None else secrets.randbits(64)) & (2**64 - 1)
    return [
        Request(
            request_id=submission.request_id if index == 0 else f"{submission.request_id}#{index}",
            prompt_token_ids=prompt,
            sampling=sampling if index == 0 else of_forks,
            max_tokens=max_tokens,
            stop_token_ids=stops,
            seed=seed,
            arrival_s=arrival_s,
            priority=priority,
            client=submission.client,
            cache_salt=submission.cache_salt,
            known_output=submission.known_output[index] if submission.known_output else None,
            grammar=submission.grammar,
            choice_index=index,
            fork_of=None if index == 0 else submission.request_id,
        )
        for index in range(n)
    ]


def _check_known_output(config: ResolvedConfig, submission: Submission, max_tokens: int) -> None:
    known = submission.known_output
    if not known:
        return
    if len(known) != submission.n:
        raise InvalidRequest(f"known_output is of {len(known)} choices but n is {submission.n}", param="known_output")
    if submission.sampling.seed is None:
        raise InvalidRequest("known_output needs the seed that it was drawn with", param="known_output")
    for index, output in enumerate(known):
        num_tokens = len(output.token_ids)
        if num_tokens >= max_tokens:
            raise InvalidRequest(
                f"known_output[{index}] has {num_tokens} of max_tokens = {max_tokens}: there is nothing to add",
                param="known_output",
            )
        if num_tokens and not 0 <= min(output.token_ids) <= max(output.token_ids) < config.vocab_size:
            raise InvalidRequest(
                f"known_output[{index}] has a token id outside the vocabulary of {config.vocab_size}",
                param="known_output",
            )


@lru_cache(maxsize=16)  # up to 0.3 MB each, and the same for every prompt of a request
def _stop_ids(given: tuple[int, ...], eos: frozenset[int]) -> frozenset[int]:
    return eos.union(given)


def _check_masks(sampling: SamplingParams, stops: frozenset[int]) -> None:
    """Raise InvalidRequest if the masks leave the first draw nothing: no retry could ever help."""
    if sampling.allowed_token_ids is None:
        return
    masked = {word[0] for word in sampling.bad_words_token_ids if len(word) == 1}
    if sampling.min_tokens > 0:
        masked |= stops
    if masked.issuperset(sampling.allowed_token_ids):
        raise InvalidRequest(
            "allowed_token_ids leaves no token to draw: each is a bad word or, before min_tokens, ends the answer",
            param="allowed_token_ids",
        )


def _checked_prompt(config: ResolvedConfig, prompt_token_ids: Sequence[int]) -> tuple[int, ...]:
    try:
        prompt = tuple(map(operator.index, prompt_token_ids))
    except TypeError as error:
        raise InvalidRequest("a prompt of token ids takes whole numbers only", param="prompt") from error
    if not prompt:
        raise InvalidRequest("the prompt has no tokens; give at least one", param="prompt")
    if len(prompt) > config.max_model_len:
        raise _too_long(config, len(prompt))
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= config.vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequest(
            f"the prompt has token id {bad} but the vocabulary has {config.vocab_size} tokens", param="prompt"
        )
    return prompt


def _too_long(config: ResolvedConfig, num_tokens: int) -> PromptTooLong:
    return PromptTooLong(
        f"This model's maximum context length is {config.max_model_len} tokens, but the prompt has {num_tokens} and "
        "leaves no room for output; shorten it or raise --max-model-len",
        param="prompt",
    )
