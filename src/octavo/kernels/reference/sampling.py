"""A draw, written out: one plain function per stage, in the order in which ``sample`` composes them.

This is the truth that every backend's sampler is tested against, and the place where the edge rules are stated:

- Arithmetic is float32 up to and including the temperature, so that backends agree on the *order* of tokens; weights
  and their sums are float64 from there.
- A masked token has logit -inf. No later stage brings one back.
- A logit that is not masked stays finite until the temperature. Bias, counts and DRY are too small to overflow; what
  the repetition penalty carries past the largest float32 stays there.
- A draw fails for one of two reasons (``DrawFailure``): the raw row is not finite, so the numbers behind it are
  suspect, or the request's masks leave no token. The engine fails that request alone.
- Every order of tokens is by value, ties to the lowest id.
- Each truncation works on the distribution that the one before it left, renormalised, and keeps at least one token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import DrawFailure, SampledToken
from octavo.core.request import uniform
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.base import Draw

Logits = NDArray[np.float32]

MIN_TEMPERATURE = 1e-5  # lower ones count as this: a gap of 0.01 then already decides, and nothing overflows
MIN_REPETITION_PENALTY = 1e-20  # lower ones count as this: float32 would round them to zero, and zero times -inf is NaN
LARGEST = float(np.finfo(np.float32).max)
MAX_DRY_MATCH = 256  # a repeat counts this many tokens beyond dry_allowed_length at most
MAX_DRY_PENALTY = 1e6  # far beyond any logit; keeps base ** n finite


def sample(logits: Logits, draw: Draw) -> SampledToken | DrawFailure:
    """One token from one row of raw logits [vocab], or why there is none."""
    params = draw.params
    if not np.isfinite(logits).all():
        return "not_finite"
    token = choose(shape(adjust(logits, draw), draw), draw)
    return "no_token_left" if token is None else report(logits, token, params.logprobs)


def adjust(logits: Logits, draw: Draw) -> Logits:
    """Bias, masks and penalties: what acts on logits before the temperature. Greedy draws take its arg-max."""
    params, history = draw.params, draw.history
    x = add_logit_bias(logits, params.logit_bias)
    x = mask(x, params.allowed_token_ids, forbidden_tokens(history, params.bad_words_token_ids, draw.banned_token_ids))
    x = mask_bits(x, draw.mask)
    x = repetition_penalty(x, history, params.repetition_penalty)
    x = output_penalties(x, history[draw.prompt_len :], params.frequency_penalty, params.presence_penalty)
    return dry_penalty(x, history, params)


def shape(x: Logits, draw: Draw) -> Logits:
    """Temperature and truncations; the identity for greedy draws."""
    params = draw.params
    if params.greedy or not np.isfinite(x).any():
        return x
    z = scale_by_temperature(x, params.temperature)
    z = keep_top_k(z, params.top_k)
    z = keep_typical(z, params.typical_p)
    z = keep_top_p(z, params.top_p)
    z = keep_min_p(z, params.min_p)
    if uniform(draw.random_stream, draw.position, 1) < params.xtc_probability:
        z = exclude_top_choices(z, params.xtc_threshold)
    return z


def choose(z: Logits, draw: Draw) -> int | None:
    """The token: arg-max if greedy, else by inverse distribution function; None if everything is masked."""
    if not np.isfinite(z).any():
        return None
    return int(np.argmax(z)) if draw.params.greedy else inverse_cdf(z, uniform(draw.random_stream, draw.position, 0))


def add_logit_bias(logits: Logits, bias: Sequence[tuple[int, float]]) -> Logits:
    """Add each bias to its token's logit."""
    x = logits.copy()
    for token, value in bias:
        x[token] += np.float32(value)
    return x


def forbidden_tokens(
    history: Sequence[int], bad_words: Sequence[Sequence[int]], banned: Sequence[int]
) -> frozenset[int]:
    """Banned tokens, and the last token of each bad word whose other tokens end the history (prompt included)."""
    last = history[-1] if len(history) else None  # looked at first: of hundreds of words few begin to be completed
    begun = (word for word in bad_words if len(word) == 1 or word[-2] == last)
    completing = (word[-1] for word in begun if list(history[len(history) - len(word) + 1 :]) == list(word[:-1]))
    return frozenset(banned) | frozenset(completing)


def mask(x: Logits, allowed: Sequence[int] | None, forbidden: frozenset[int]) -> Logits:
    """-inf for every token that is not allowed (None: all are) or is forbidden."""
    out = x.copy()
    if allowed is not None:
        out[:] = -np.inf
        out[list(allowed)] = x[list(allowed)]
    out[list(forbidden)] = -np.inf
    return out


def mask_bits(x: Logits, bits: NDArray[np.uint32] | None) -> Logits:
    """-inf for every token t whose bit, t % 32 of word t // 32, is not set (None: all are)."""
    if bits is None:
        return x
    allowed = np.unpackbits(bits.astype("<u4").view(np.uint8), bitorder="little")[: len(x)]
    return np.where(allowed == 1, x, np.float32(-np.inf))


def repetition_penalty(x: Logits, history: Sequence[int], penalty: float) -> Logits:
    """Divide positive and multiply other logits of tokens seen in prompt or output (Keskar et al. 2019, CTRL)."""
    out, factor = x.copy(), np.float32(max(penalty, MIN_REPETITION_PENALTY))
    if penalty != 1.0:
        with np.errstate(over="ignore"):
            for token in set(history):
                scaled = x[token] / factor if x[token] > 0 else x[token] * factor
                out[token] = x[token] if x[token] == -np.inf else np.clip(scaled, -LARGEST, LARGEST)
    return out


def output_penalties(x: Logits, output: Sequence[int], frequency: float, presence: float) -> Logits:
    """Subtract frequency * count, then presence, from the logit of each token of the output."""
    out = x.copy()
    for token in set(output):
        count = np.float32(list(output).count(token))
        out[token] = x[token] - np.float32(frequency) * count - np.float32(presence)
    return out


def dry_penalty(x: Logits, history: Sequence[int], params: SamplingParams) -> Logits:
    """DRY, "don't repeat yourself" (p-e-w 2024, oobabooga/text-generation-webui PR 5677).

    If the last n tokens of the history also stand earlier in it, followed by token t, then t would lengthen a repeat:
    its logit loses multiplier * base ** (n - allowed_length), for the longest such n, if n >= allowed_length. Only the
    last ``dry_penalty_last_n`` tokens are looked at, a repeat never reaches across a sequence breaker (nor begins at
    one: no penalty right after a breaker), and n counts up to allowed_length + ``MAX_DRY_MATCH``.
    """
    out = x.copy()
    if params.dry_multiplier == 0.0 or params.dry_penalty_last_n == 0:
        return out
    last_n = len(history) if params.dry_penalty_last_n < 0 else params.dry_penalty_last_n
    seen, breakers = list(history)[-last_n:] if last_n else [], set(params.dry_sequence_breaker_ids)
    longest = dict[int, int]()
    for end in range(1, len(seen)):  # the earlier stretch ends before position ``end``; seen[end] followed it
        n = 0
        while n < end and seen[end - 1 - n] == seen[-1 - n] and seen[-1 - n] not in breakers:
            n += 1
        longest[seen[end]] = max(longest.get(seen[end], 0), n)
    for token, n in longest.items():
        if n >= params.dry_allowed_length:
            power = params.dry_base ** min(n - params.dry_allowed_length, MAX_DRY_MATCH)
            out[token] = x[token] - np.float32(min(params.dry_multiplier * power, MAX_DRY_PENALTY))
    return out


def scale_by_temperature(x: Logits, temperature: float) -> Logits:
    """(x - max x) / temperature, in float32: the likeliest token is at 0. A few lie at -inf where that overflows."""
    with np.errstate(over="ignore"):
        scaled: Logits = (x - x.max()) / np.float32(max(temperature, MIN_TEMPERATURE))
    return scaled


def weights(z: Logits) -> NDArray[np.float64]:
    """exp(z - max z): probabilities up to a common factor, the likeliest at exactly 1."""
    w: NDArray[np.float64] = np.exp(z.astype(np.float64) - z.max())
    return w


def keep_top_k(z: Logits, k: int) -> Logits:
    """Mask all but the k likeliest; 0 keeps all."""
    order = np.argsort(-z, kind="stable")
    return _only(z, order[:k] if k > 0 else order)


def keep_typical(z: Logits, p: float) -> Logits:
    """Keep the smallest set of tokens of mass >= p whose surprise is nearest the entropy (Meister et al. 2022,
    arXiv:2202.00666): in order of | -log p_i - H |, float64.
    """
    if p >= 1.0:
        return z
    w = weights(z)
    log_p = z.astype(np.float64) - z.max() - np.log(w.sum())
    entropy = -np.sum(w / w.sum() * np.where(w > 0, log_p, 0.0))
    order = np.argsort(np.abs(log_p + entropy), kind="stable")
    return _only(z, _shortest_prefix(w, order, p))


def keep_top_p(z: Logits, p: float) -> Logits:
    """Keep the smallest set of likeliest tokens of mass >= p (Holtzman et al. 2020, arXiv:1904.09751)."""
    if p >= 1.0:
        return z
    return _only(z, _shortest_prefix(weights(z), np.argsort(-z, kind="stable"), p))


def keep_min_p(z: Logits, min_p: float) -> Logits:
    """Keep tokens at least min_p times as likely as the likeliest (Nguyen et al. 2024, arXiv:2407.01082)."""
    return np.where(weights(z) >= min_p, z, np.float32(-np.inf))


def exclude_top_choices(z: Logits, threshold: float) -> Logits:
    """XTC: of the tokens with probability >= threshold, remove all but the least likely (p-e-w 2024, PR 6335).

    Fewer than two such tokens: nothing is removed. Of equally unlikely ones the highest id stays.
    """
    w = weights(z)
    order = np.argsort(-z, kind="stable")
    above = order[(w[order] >= threshold * w.sum()) & (w[order] > 0)]
    out = z.copy()
    out[above[:-1]] = -np.inf
    return out


def inverse_cdf(z: Logits, u: float) -> int:
    """The first id whose cumulative weight, in id order, exceeds u times the total (float64)."""
    w = weights(z)
    cumulative = np.cumsum(w)
    first = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return min(first, int(np.flatnonzero(w)[-1]))  # u = 1 - 2**-53 may round to the total


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    """Natural log-probabilities of a raw row."""
    x = logits.astype(np.float64) - logits.max()
    logprobs: NDArray[np.float64] = x - np.log(np.exp(x).sum())
    return logprobs


def report(logits: Logits, token: int, num_alternatives: int | None) -> SampledToken:
    """The token with its logprob under the raw logits and the likeliest alternatives; None: without."""
    if num_alternatives is None:
        return SampledToken(token_id=token)
    logprobs = log_softmax(logits)
    best = np.argsort(-logits, kind="stable")[:num_alternatives]
    return SampledToken(
        token_id=token, logprob=float(logprobs[token]), top=tuple((int(i), float(logprobs[i])) for i in best)
    )


def _shortest_prefix(w: NDArray[np.float64], order: NDArray[np.intp], share: float) -> NDArray[np.intp]:
    """The head of ``order`` whose weight first reaches ``share`` of the total; at least one token."""
    reached = np.cumsum(w[order]) >= share * w.sum()
    return order[: int(np.argmax(reached)) + 1] if reached.any() else order


def _only(z: Logits, kept: NDArray[np.intp]) -> Logits:
    out = np.full_like(z, -np.inf)
    out[kept] = z[kept]
    return out
