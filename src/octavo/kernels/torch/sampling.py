"""Draws and reported logprobs on torch logits. What each stage means is written out in ``reference/sampling.py``.

Rows are grouped by what they need, so that a greedy row costs an arg-max and a plain random one a sum; only rows that
ask for more pay for it. The device does the passes over the vocabulary in float32 (not every device has float64), the
host the rest in float64 on a few hundred numbers per row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.plan import DrawFailure, SampledToken
from octavo.core.request import uniform
from octavo.kernels.base import Draw
from octavo.kernels.reference.sampling import MIN_TEMPERATURE
from octavo.kernels.torch.adjust import adjust, needs_adjusting
from octavo.kernels.torch.truncation import draw_from_candidates, draw_from_row, xtc_strikes

CHUNK = 128  # token ids that the device reduces to one number before the host looks for the token
CANDIDATES = (64, 1024)  # likeliest tokens fetched, first try and second; beyond that the whole row

Ids = NDArray[np.int64]


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[SampledToken | DrawFailure]:
    """One token per row of raw logits [rows, vocab] float32, which are left as they are.

    Where there is none, why: the row is not finite or all its tokens are masked; other rows are untouched by that.
    """
    tokens = np.full(len(draws), -1, dtype=np.int64)
    finite = _finite_rows(logits)
    changed = [needs_adjusting(draw) for draw in draws]
    for with_changes in (False, True):
        rows = [row for row in range(len(draws)) if finite[row] and changed[row] is with_changes]
        if rows:
            x, chosen = _rows(logits, rows), [draws[row] for row in rows]
            if with_changes:
                x = x.clone() if len(rows) == len(draws) else x
                adjust(x, chosen)
                left = torch.amax(x, dim=-1).cpu().numpy() > -np.inf
                if not left.all():
                    kept = np.flatnonzero(left).tolist()
                    x, chosen, rows = _rows(x, kept), [chosen[i] for i in kept], [rows[i] for i in kept]
            tokens[rows] = _choose(x, chosen)
    out: list[SampledToken | DrawFailure] = [
        SampledToken(token_id=token) if token >= 0 else "no_token_left" if ok else "not_finite"
        for token, ok in zip(tokens.tolist(), finite, strict=True)
    ]
    _report(logits, draws, out)
    return out


def row_logprobs(logits: torch.Tensor, targets: Sequence[tuple[int, int]]) -> list[SampledToken | DrawFailure]:
    """Log-softmax of raw rows [rows, vocab] at (token, with so many alternatives), where the row is finite.

    Alternatives are the likeliest tokens, ties to the lowest id.
    """
    high = torch.amax(logits, dim=-1, keepdim=True)
    log_total = high + (logits - high).exp_().sum(dim=-1, keepdim=True).log_()
    wanted = torch.tensor([token for token, _ in targets], device=logits.device).unsqueeze(1)
    at_target = (logits.gather(1, wanted) - log_total)[:, 0].tolist()
    finite = _finite_rows(logits)
    most = max(count for _, count in targets)
    tops: list[list[tuple[int, float]]] = [[] for _ in targets]
    if most:
        values, ids = top_with_lowest_ids(logits, most)
        logprobs = (values - log_total).tolist()
        tops = [list(zip(row_ids, row, strict=True)) for row_ids, row in zip(ids.tolist(), logprobs, strict=True)]
    return [
        SampledToken(token_id=token, logprob=logprob, top=tuple(top[:count])) if ok else "not_finite"
        for (token, count), logprob, top, ok in zip(targets, at_target, tops, finite, strict=True)
    ]


def top_with_lowest_ids(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids [rows, min(k, vocab)] of the k largest, falling, ties to the lowest id.

    topk leaves the choice among equals open: one more than asked shows whether equals straddle the boundary, and
    only such rows are looked at again.
    """
    k = min(k, logits.shape[1])
    values, ids = torch.topk(logits, min(k + 1, logits.shape[1]), dim=-1)
    host_values, host_ids = values.cpu().numpy(), ids.cpu().numpy()
    if host_values.shape[1] > k:
        for row in np.flatnonzero(host_values[:, k - 1] == host_values[:, k]):
            equal = np.flatnonzero(logits[int(row)].cpu().numpy() == host_values[row, k])
            above = host_ids[row][host_values[row] > host_values[row, k]]
            host_ids[row, :k] = np.concatenate([above, equal[: k - len(above)]])
    host_values, host_ids = host_values[:, :k], host_ids[:, :k]
    order = np.lexsort((host_ids, -host_values), axis=1)
    by_rank = torch.from_numpy(np.take_along_axis(host_ids, order, axis=1)).to(logits.device)
    return logits.gather(1, by_rank), by_rank


def _choose(x: torch.Tensor, draws: Sequence[Draw]) -> Ids:
    """Tokens of adjusted rows that have at least one left."""
    greedy, plain, truncated, whole = (list[int](), list[int](), list[int](), list[int]())
    for row, draw in enumerate(draws):
        params = draw.params
        if params.greedy:
            greedy.append(row)
        elif params.typical_p < 1.0 or params.top_k >= CANDIDATES[-1]:
            whole.append(row)
        elif params.top_k or params.top_p < 1.0 or params.min_p > 0.0:
            truncated.append(row)
        else:
            (whole if xtc_strikes(draw) else plain).append(row)
    tokens = np.full(len(draws), -1, dtype=np.int64)
    if greedy:
        tokens[greedy] = _first_maximum(_rows(x, greedy))
    if plain:
        tokens[plain] = _draw_plain(_rows(x, plain), [draws[row] for row in plain])
    if truncated:
        z = _scaled(_rows(x, truncated), [draws[row] for row in truncated])
        tokens[truncated] = _draw_truncated(z, [draws[row] for row in truncated])
    for row in whole:
        tokens[row] = draw_from_row(_scaled(x[row : row + 1], [draws[row]])[0].cpu().numpy(), draws[row])
    return tokens


def _first_maximum(x: torch.Tensor) -> Ids:
    """Arg-max of each row, ties to the lowest id.

    Not torch.argmax: which of several equals it returns has differed between devices and versions. This is faster too.
    """
    chunks = _chunked(x, -math.inf)
    chunk: Ids = np.argmax(torch.amax(chunks, dim=-1).cpu().numpy(), axis=1)
    tokens: Ids = chunk * CHUNK + np.argmax(_fetch(chunks, chunk), axis=1)
    return tokens


def _draw_plain(x: torch.Tensor, draws: Sequence[Draw]) -> Ids:
    """Inverse distribution function over the whole vocabulary, in two levels: chunks of ids, then ids of one chunk.

    The device sums exp((logit - max) / temperature) per chunk; the host accumulates chunk sums and then one chunk's
    weights in float64. So no running float32 sum over the vocabulary, which would drop the small ones.
    """
    weights = _chunked(_scaled(x, draws).exp_(), 0.0)
    sums = weights.sum(dim=-1).cpu().numpy().astype(np.float64)
    cumulative = np.cumsum(sums, axis=1)
    target = np.array([uniform(draw.random_stream, draw.position, 0) for draw in draws]) * cumulative[:, -1]
    chunk = _first_above(cumulative, sums, target)
    before = np.where(chunk > 0, np.take_along_axis(cumulative, np.maximum(chunk - 1, 0)[:, None], axis=1)[:, 0], 0.0)
    within = _fetch(weights, chunk).astype(np.float64)
    return chunk * CHUNK + _first_above(np.cumsum(within, axis=1), within, target - before)


def _chunked(x: torch.Tensor, fill: float) -> torch.Tensor:
    """x [rows, vocab] -> [rows, chunks, CHUNK]: a view where the vocabulary allows, else a copy padded with fill."""
    rows, vocab_size = x.shape
    if vocab_size % CHUNK:
        padded = torch.full((rows, -(-vocab_size // CHUNK) * CHUNK), fill, device=x.device)
        padded[:, :vocab_size] = x
        x = padded
    return x.view(rows, -1, CHUNK)


def _fetch(chunks: torch.Tensor, chunk: Ids) -> NDArray[np.float32]:
    """One chunk of each row, on the host: [rows, CHUNK]."""
    rows, num_chunks, _ = chunks.shape
    at = torch.from_numpy(np.arange(rows) * num_chunks + chunk).to(chunks.device)
    fetched: NDArray[np.float32] = chunks.view(-1, CHUNK).index_select(0, at).cpu().numpy()
    return fetched


def _first_above(cumulative: NDArray[np.float64], parts: NDArray[np.float64], target: NDArray[np.float64]) -> Ids:
    """Per row the first column whose cumulative weight exceeds target; the last that weighs anything if none does."""
    first = np.count_nonzero(cumulative <= target[:, None], axis=1)
    last = parts.shape[1] - 1 - np.argmax(parts[:, ::-1] > 0, axis=1)
    chosen: Ids = np.minimum(first, last)
    return chosen


def _draw_truncated(z: torch.Tensor, draws: Sequence[Draw]) -> Ids:
    """From the likeliest tokens, more of them for rows that need more; see ``truncation``."""
    tokens = np.full(len(draws), -1, dtype=np.int64)
    total = torch.exp(z).sum(dim=-1).cpu().numpy().astype(np.float64)
    for num_candidates in CANDIDATES:
        rows = [row for row in np.flatnonzero(tokens < 0).tolist() if draws[row].params.top_k < num_candidates]
        if rows:
            values, ids = torch.topk(_rows(z, rows), min(num_candidates, z.shape[1]), dim=-1)
            tokens[rows] = draw_from_candidates(
                values.cpu().numpy().astype(np.float64),
                ids.cpu().numpy(),
                total[rows],
                z.shape[1],
                [draws[row] for row in rows],
            )
    for row in np.flatnonzero(tokens < 0).tolist():
        tokens[row] = draw_from_row(z[row].cpu().numpy(), draws[row])
    return tokens


def _scaled(x: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """(x - max x) / temperature."""
    temperatures = np.array([max(draw.params.temperature, MIN_TEMPERATURE) for draw in draws], np.float32)
    return (x - torch.amax(x, dim=-1, keepdim=True)).div_(torch.from_numpy(temperatures).to(x.device).unsqueeze(1))


def _report(logits: torch.Tensor, draws: Sequence[Draw], out: list[SampledToken | DrawFailure]) -> None:
    """Fill in the logprobs of the draws that ask for them."""
    wanted = [
        (row, (token.token_id, draw.params.logprobs))
        for row, (draw, token) in enumerate(zip(draws, out, strict=True))
        if isinstance(token, SampledToken) and draw.params.logprobs is not None
    ]
    if wanted:
        rows = [row for row, _ in wanted]
        for row, token in zip(rows, row_logprobs(_rows(logits, rows), [target for _, target in wanted]), strict=True):
            out[row] = token


def _finite_rows(logits: torch.Tensor) -> list[bool]:
    """Whether each row is free of NaN and infinities: both ends are finite, and NaN reaches both ends."""
    low, high = torch.amin(logits, dim=-1), torch.amax(logits, dim=-1)  # aminmax is four times slower on the CPU
    return [math.isfinite(a) and math.isfinite(b) for a, b in zip(low.tolist(), high.tolist(), strict=True)]


def _rows(x: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Those rows, without a copy when they are all."""
    return x if len(rows) == x.shape[0] else x.index_select(0, torch.tensor(rows, device=x.device, dtype=torch.long))
