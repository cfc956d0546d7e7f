"""Truncated draws without a sort of the vocabulary, on the host in float64.

Top-k, top-p and min-p each keep a *prefix* of the tokens in order of likelihood, and XTC drops the head of what is
left, so what may be drawn is a range [low, high) of that order. ``draw_from_candidates`` finds the range for many rows
at once, given the few hundred likeliest tokens of each; it says which rows those were too few for. Such flat rows, and
typical sampling, whose set is no prefix, go one by one through ``draw_from_row``, which sees the whole row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.core.request import uniform
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.base import Draw

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

_SMALL = 512  # tokens that are sorted rather than counted once more
_BINS = 4096


def xtc_strikes(draw: Draw) -> bool:
    """Whether this draw's coin fell for XTC."""
    probability = draw.params.xtc_probability
    return probability > 0.0 and uniform(draw.random_stream, draw.position, 1) < probability


def draw_from_candidates(z: Floats, ids: Ids, total: Floats, vocab_size: int, draws: Sequence[Draw]) -> Ids:
    """Token of each row, or -1 where the candidates do not settle it.

    z:     [rows, K] the K largest (logit - max) / temperature of each row, falling; in the first column 0
    ids:   [rows, K] their token ids; the order among equals is free
    total: [rows] sum of exp(z) over the whole vocabulary

    What ties with the smallest candidate may be missing others like it, so only those strictly above it are *known*.
    """
    z, ids = _ties_to_the_lowest_id(z, ids)
    width = z.shape[1]
    k, p, min_p, threshold = (
        np.array([getattr(draw.params, name) for draw in draws])
        for name in ("top_k", "top_p", "min_p", "xtc_threshold")
    )
    w = np.exp(z)
    cumulative = np.cumsum(w, axis=1)
    exhaustive = (z[:, -1] == -np.inf) | (width == vocab_size)  # no candidate is missing
    known = np.where(exhaustive, width, np.count_nonzero(z > z[:, -1:], axis=1))
    everything = np.where(exhaustive, width, vocab_size)

    # how many tokens each truncation would leave; more than ``known`` means that the candidates cannot tell
    by_k = np.where(k > 0, np.minimum(k, everything), everything)
    k_settled = by_k <= known
    total = np.where(k_settled, _at(cumulative, by_k - 1), total)
    by_p = np.where(p < 1.0, np.count_nonzero(cumulative < (p * total)[:, None], axis=1) + 1, everything)
    by_min_p = np.where(w[:, -1] < min_p, np.count_nonzero(w >= min_p[:, None], axis=1), everything)
    high = np.minimum(np.minimum(by_k, by_p), by_min_p)
    settled = (high <= known) & (k_settled | (by_k == everything) | (p == 1.0))  # top-p needs the total that top-k left

    high = np.where(settled, high, 1)
    columns = np.arange(int(high.max()))
    w, ids, inside = w[:, : len(columns)], ids[:, : len(columns)], columns < high[:, None]
    above = (w >= (threshold * _at(cumulative, high - 1))[:, None]) & inside & (w > 0)
    strikes = np.array([xtc_strikes(draw) for draw in draws])
    low = np.where(strikes, np.maximum(np.count_nonzero(above, axis=1) - 1, 0), 0)
    w = np.where(inside & (columns >= low[:, None]), w, 0.0)
    return np.where(settled, _inverse_cdf(w, ids, draws), -1)


def draw_from_row(z: NDArray[np.float32], draw: Draw) -> int:
    """Token of one row that sees the whole vocabulary: z [vocab] = (logit - max) / temperature."""
    params = draw.params
    log_w = z.astype(np.float64)
    w = _truncate(log_w, np.exp(log_w), params)
    if xtc_strikes(draw):
        above = np.flatnonzero((w >= params.xtc_threshold * w.sum()) & (w > 0))
        if len(above) > 1:
            survivor = above[np.flatnonzero(log_w[above] == log_w[above].min())[-1]]
            kept = w[survivor]
            w[above] = 0.0
            w[survivor] = kept
    cumulative = np.cumsum(w)
    first = int(
        np.searchsorted(cumulative, uniform(draw.random_stream, draw.position, 0) * cumulative[-1], side="right")
    )
    return first if first < len(w) else int(np.flatnonzero(w)[-1])  # u * total may round to the total


def smallest_set(key: Floats, weight: Floats, target: float) -> NDArray[np.bool_]:
    """The shortest prefix, in order of falling key and then rising index, whose weight reaches ``target`` > 0.

    A histogram of the weight over the range of keys says in which bin the boundary lies; only that bin is looked at
    again, and sorted once it is small or all its keys are equal. Everything, if the whole weight falls short.
    """
    kept = np.zeros(len(key), dtype=bool)
    rest = np.flatnonzero(weight > 0)
    while len(rest) > _SMALL:
        keys = key[rest]
        top, bottom = keys.max(), keys.min()
        if top == bottom:
            break
        bins = ((top - keys) * ((_BINS - 1) / (top - bottom))).astype(np.int64)  # top and bottom always part
        cumulative = np.cumsum(np.bincount(bins, weights=weight[rest], minlength=_BINS))
        boundary = int(np.searchsorted(cumulative, target))
        kept[rest[bins < boundary]] = True
        target -= float(cumulative[boundary - 1]) if boundary else 0.0
        rest = rest[bins == boundary]
    order = rest[np.argsort(-key[rest], kind="stable")]
    kept[order[: int(np.searchsorted(np.cumsum(weight[order]), target)) + 1]] = True
    return kept


def _truncate(log_w: Floats, w: Floats, params: SamplingParams) -> Floats:
    """Weights after top-k, typical, top-p and min-p; removed tokens weigh 0."""
    if 0 < params.top_k < len(w):
        w = np.where(smallest_set(log_w, np.where(log_w > -np.inf, 1.0, 0.0), params.top_k), w, 0.0)
    if params.typical_p < 1.0:
        share = w / w.sum()
        log_p = log_w - np.log(w.sum())
        entropy = -np.sum(np.where(share > 0, share * np.where(share > 0, log_p, 0.0), 0.0))
        w = np.where(smallest_set(-np.abs(log_p + entropy), w, params.typical_p * w.sum()), w, 0.0)
    if params.top_p < 1.0:
        w = np.where(smallest_set(log_w, w, params.top_p * w.sum()), w, 0.0)
    return np.where(w >= params.min_p * w.max(), w, 0.0) if params.min_p > 0.0 else w


def _ties_to_the_lowest_id(z: Floats, ids: Ids) -> tuple[Floats, Ids]:
    """Reorder equals by rising id, which topk does not promise."""
    if not ((z[:, 1:] == z[:, :-1]) & (z[:, 1:] > -np.inf)).any():
        return z, ids
    order = np.lexsort((ids, -z), axis=1)
    return np.take_along_axis(z, order, axis=1), np.take_along_axis(ids, order, axis=1)


def _at(cumulative: Floats, column: Ids) -> Floats:
    """One column per row, clipped to the array."""
    column = np.clip(column, 0, cumulative.shape[1] - 1)
    return np.take_along_axis(cumulative, column[:, None], axis=1)[:, 0]


def _inverse_cdf(w: Floats, ids: Ids, draws: Sequence[Draw]) -> Ids:
    """In each row the first id, in rising order, whose cumulative weight exceeds u times the total."""
    order = np.argsort(ids, axis=1)
    w = np.take_along_axis(w, order, axis=1)
    cumulative = np.cumsum(w, axis=1)
    u = np.array([uniform(draw.random_stream, draw.position, 0) for draw in draws])
    first = np.count_nonzero(cumulative <= (u * cumulative[:, -1])[:, None], axis=1)
    last = w.shape[1] - 1 - np.argmax(w[:, ::-1] > 0, axis=1)
    chosen = np.minimum(first, last)[:, None]
    return np.take_along_axis(np.take_along_axis(ids, order, axis=1), chosen, axis=1)[:, 0]
