"""Bias, masks and penalties on a few rows of logits: a handful of batched device ops over (row, token) pairs.

The pairs are made on the host from the histories; the arithmetic is float32 in the order of the reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.sampling_params import SamplingParams
from octavo.kernels.base import Draw
from octavo.kernels.reference.sampling import (
    LARGEST,
    MAX_DRY_MATCH,
    MAX_DRY_PENALTY,
    MIN_REPETITION_PENALTY,
    forbidden_tokens,
)

Tokens = NDArray[np.int64]


def needs_adjusting(draw: Draw) -> bool:
    """Whether anything acts on this draw's logits before the temperature."""
    params = draw.params
    return bool(
        params.logit_bias
        or draw.banned_token_ids
        or params.allowed_token_ids is not None
        or params.needs_history
        or draw.mask is not None
    )


def adjust(x: torch.Tensor, draws: Sequence[Draw]) -> None:
    """Change x [rows, vocab] float32 in place, each row as its draw says; as ``reference.sampling.adjust``."""
    histories = [_history(draw) for draw in draws]
    _add_bias(x, draws)
    _mask(x, draws)
    _penalise(x, draws, histories)
    _dry(x, draws, histories)


def dry_penalties(history: Tokens, params: SamplingParams) -> dict[int, float]:
    """Token -> what DRY subtracts from its logit; the rule is ``reference.sampling.dry_penalty``.

    All earlier occurrences of the last token grow backwards together, one token per turn of the loop, and those that
    stop matching drop out.
    """
    last_n, allowed = params.dry_penalty_last_n, params.dry_allowed_length
    seen = history if last_n < 0 else history[max(0, len(history) - last_n) :]
    barrier = np.isin(seen[::-1], params.dry_sequence_breaker_ids)
    reach = int(np.argmax(barrier)) if barrier.any() else len(seen)  # tokens since the last breaker
    alive = np.arange(1, len(seen))  # the earlier stretch ends before ``alive``
    matched = np.zeros(len(seen), dtype=np.int64)
    for n in range(min(reach, len(seen) - 1, allowed + MAX_DRY_MATCH)):
        alive = alive[alive > n]
        alive = alive[seen[alive - 1 - n] == seen[-1 - n]]
        if not len(alive):
            break
        matched[alive] = n + 1
    penalties: dict[int, float] = {}
    for end in np.flatnonzero(matched >= allowed):
        power = params.dry_base ** int(matched[end] - allowed)
        penalty = min(params.dry_multiplier * power, MAX_DRY_PENALTY)
        token = int(seen[end])
        penalties[token] = max(penalties.get(token, 0.0), penalty)
    return penalties


def _history(draw: Draw) -> Tokens:
    return np.asarray(draw.history, dtype=np.int64)


def _add_bias(x: torch.Tensor, draws: Sequence[Draw]) -> None:
    rows: list[int] = []
    totals: list[tuple[int, float]] = []
    for row, draw in enumerate(draws):
        rows += [row] * len(draw.params.logit_bias)
        totals += draw.params.logit_bias
    if rows:
        at = _pairs(x, rows, [token for token, _ in totals])
        x.index_put_(at, x[at] + _floats(x, [value for _, value in totals]))


def _mask(x: torch.Tensor, draws: Sequence[Draw]) -> None:
    rows: list[int] = []
    tokens: list[int] = []
    for row, draw in enumerate(draws):
        params = draw.params
        if draw.mask is not None:
            bits = np.unpackbits(draw.mask.astype("<u4").view(np.uint8), bitorder="little")[: x.shape[1]]
            x[row].masked_fill_(torch.from_numpy(bits == 0).to(x.device), -math.inf)
        if params.allowed_token_ids is not None:
            allowed = torch.tensor(params.allowed_token_ids, device=x.device)
            kept = x[row].index_select(0, allowed)
            x[row] = -math.inf
            x[row].index_copy_(0, allowed, kept)
        if draw.banned_token_ids or params.bad_words_token_ids:
            forbidden = forbidden_tokens(draw.history, params.bad_words_token_ids, draw.banned_token_ids)
            rows += [row] * len(forbidden)
            tokens += forbidden
    if rows:
        x.index_put_(_pairs(x, rows, tokens), torch.full((), -math.inf, device=x.device))


def _penalise(x: torch.Tensor, draws: Sequence[Draw], histories: Sequence[Tokens]) -> None:
    """Repetition, frequency and presence, over the distinct tokens of each history at once."""
    rows, tokens, counts = [], [], []
    for row, (draw, history) in enumerate(zip(draws, histories, strict=True)):
        params = draw.params
        if params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
            in_output = np.bincount(history[draw.prompt_len :], minlength=x.shape[1])
            seen = np.unique(history) if params.repetition_penalty != 1.0 else np.flatnonzero(in_output)
            rows.append(np.full(len(seen), row))
            tokens.append(seen)
            counts.append(in_output[seen])
    if not rows:
        return
    at_row, count = np.concatenate(rows), np.concatenate(counts)
    at = _pairs(x, at_row, np.concatenate(tokens))
    by_row = np.array([max(draw.params.repetition_penalty, MIN_REPETITION_PENALTY) for draw in draws])
    repetition = _floats(x, by_row[at_row])
    frequency = np.array([draw.params.frequency_penalty for draw in draws], np.float32)[at_row] * count.astype(
        np.float32
    )
    presence = np.array([draw.params.presence_penalty for draw in draws])[at_row] * (count > 0)
    values = x[at]
    scaled = torch.where(values > 0, values / repetition, values * repetition).clamp_(-LARGEST, LARGEST)
    values = torch.where(values > -math.inf, scaled, values)  # what is masked stays so
    x.index_put_(at, values - _floats(x, frequency) - _floats(x, presence))


def _dry(x: torch.Tensor, draws: Sequence[Draw], histories: Sequence[Tokens]) -> None:
    rows: list[int] = []
    found: list[tuple[int, float]] = []
    for row, (draw, history) in enumerate(zip(draws, histories, strict=True)):
        if draw.params.dry_multiplier > 0.0 and draw.params.dry_penalty_last_n != 0:
            penalties = dry_penalties(history, draw.params)
            rows += [row] * len(penalties)
            found += penalties.items()
    if rows:
        at = _pairs(x, rows, [token for token, _ in found])
        x.index_put_(at, x[at] - _floats(x, [penalty for _, penalty in found]))


def _pairs(x: torch.Tensor, rows: Iterable[int], tokens: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of the entries (row, token) of x."""
    index = torch.from_numpy(np.stack([np.asarray(rows, np.int64), np.asarray(tokens, np.int64)])).to(x.device)
    return index[0], index[1]


def _floats(x: torch.Tensor, values: Sequence[float] | NDArray[np.float64] | NDArray[np.float32]) -> torch.Tensor:
    """To the device as float32: rounded on the host, since not every device has float64."""
    return torch.from_numpy(np.asarray(values, dtype=np.float32)).to(x.device)
