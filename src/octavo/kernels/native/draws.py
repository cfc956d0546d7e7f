"""What the C++ sampler needs to know of each draw, as one structured array and a few ragged lists.

A sequence keeps its ``DrawRule``, so the record of a plain one, which needs no lists, is made once. Others share what
follows from their ``SamplingParams``, which stay the same object for a whole request. Both are remembered by identity
and forgotten when that object dies: no memory is kept beyond the requests that it is of.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from octavo.core.limits import MAX_BAD_WORD_TOKENS
from octavo.core.plan import DrawRule
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.reference.sampling import MIN_REPETITION_PENALTY, MIN_TEMPERATURE, forbidden_tokens

#: Mirrors ``DrawParams`` in csrc/sampling.h.
DRAW_DTYPE = np.dtype(
    [
        ("stream", "<u8"),
        ("typical_p", "<f8"),
        ("top_p", "<f8"),
        ("min_p", "<f8"),
        ("xtc_probability", "<f8"),
        ("xtc_threshold", "<f8"),
        ("dry_multiplier", "<f8"),
        ("dry_base", "<f8"),
        ("temperature", "<f4"),
        ("repetition_penalty", "<f4"),
        ("presence_penalty", "<f4"),
        ("frequency_penalty", "<f4"),
        ("top_k", "<i4"),
        ("dry_allowed_length", "<i4"),
        ("dry_penalty_last_n", "<i4"),
        ("num_logprobs", "<i4"),
        ("prompt_len", "<i4"),
        ("has_allowed", "<i4"),
        ("num_bias", "<i4"),
        ("num_allowed", "<i4"),
        ("num_forbidden", "<i4"),
        ("num_history", "<i4"),
        ("num_breakers", "<i4"),
        ("goes_on", "<i4"),  # the next draw has the same history, and as much of it or more
    ]
)
DrawList = NDArray[np.int32] | NDArray[np.float32]
_NO_INTS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What depends on the parameters alone."""

    record: bytes  # of DRAW_DTYPE, without what depends on the sequence
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    allowed: NDArray[np.int32]
    breakers: NDArray[np.int32]
    plain: bool  # neither lists nor history


class DrawPacker:
    """Turns draws into arrays; remembers what it knows of their rules."""

    def __init__(self) -> None:
        # by id() of what must be alive: it takes its entry with it before its id can be another's
        self._plain: dict[int, bytes] = {}
        self._prepared: dict[int, _Prepared] = {}

    def pack(self, draws: Sequence[DrawRule], history_lens: Sequence[int] = ()) -> tuple[bytes, list[DrawList]]:
        """Records of DRAW_DTYPE, one per draw, and the lists of those that are not plain.

        Lists: bias ids, allowed, forbidden, history, breakers, bias values, each of one draw after the other; [] if
        none has any. history_lens: how much of its rule's history each draw sees; () all.
        """
        plain = self._plain
        try:
            return b"".join([plain[id(rule)] for rule in draws]), []
        except KeyError:
            return self._pack_new(draws, history_lens)

    def _pack_new(self, draws: Sequence[DrawRule], history_lens: Sequence[int]) -> tuple[bytes, list[DrawList]]:
        """The same where a draw is not plain, or new."""
        prepared = [self._prepared.get(id(rule.params)) or self._prepare(rule.params) for rule in draws]
        records = np.frombuffer(bytearray().join([half.record for half in prepared]), DRAW_DTYPE)
        records["stream"] = [rule.random_stream for rule in draws]
        plain = [half.plain and not rule.banned_token_ids for rule, half in zip(draws, prepared, strict=True)]
        for rule, record, is_plain in zip(draws, records, plain, strict=True):
            if is_plain and id(rule) not in self._plain:
                self._plain[id(rule)] = record.tobytes()
                weakref.finalize(rule, self._plain.pop, id(rule), None).atexit = False
        lists = [] if all(plain) else _add_lists(records, draws, prepared, history_lens)
        return records.tobytes(), lists

    def _prepare(self, params: SamplingParams) -> _Prepared:
        made = self._prepared[id(params)] = _prepare(params)
        weakref.finalize(params, self._prepared.pop, id(params), None).atexit = False
        return made


def _prepare(params: SamplingParams) -> _Prepared:
    record = np.zeros(1, DRAW_DTYPE)
    for name in ("typical_p", "top_p", "min_p", "xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base"):
        record[name] = getattr(params, name)
    for name in ("presence_penalty", "frequency_penalty"):
        record[name] = getattr(params, name)
    record["repetition_penalty"] = max(params.repetition_penalty, MIN_REPETITION_PENALTY)
    for name in ("top_k", "dry_allowed_length", "dry_penalty_last_n"):
        record[name] = getattr(params, name)
    record["temperature"] = 0.0 if params.greedy else max(params.temperature, MIN_TEMPERATURE)
    record["num_logprobs"] = -1 if params.logprobs is None else params.logprobs
    bias = dict(params.logit_bias)
    record["num_bias"] = len(bias)
    record["has_allowed"] = params.allowed_token_ids is not None
    record["num_allowed"] = len(params.allowed_token_ids or ())
    breakers = params.dry_sequence_breaker_ids if params.dry_multiplier > 0.0 else ()
    record["num_breakers"] = len(breakers)
    return _Prepared(
        record.tobytes(),
        np.array(list(bias), np.int32),
        np.array(list(bias.values()), np.float32),
        np.array(params.allowed_token_ids or (), np.int32),
        np.array(breakers, np.int32),
        plain=not (bias or params.allowed_token_ids is not None or breakers or params.needs_history),
    )


def _add_lists(
    records: NDArray[np.void], draws: Sequence[DrawRule], prepared: Sequence[_Prepared], history_lens: Sequence[int]
) -> list[DrawList]:
    """The lists of these draws; their lengths go into the records. Draws that share a history have it once."""
    if history_lens:
        history, lens, records["goes_on"] = _heads(draws, history_lens)
    else:
        history = [np.asarray(d.history, np.int32) if d.params.needs_history else _NO_INTS for d in draws]
        lens = [len(tokens) for tokens in history]
    forbidden = list(map(_forbidden, draws, lens))
    records["num_forbidden"] = [len(tokens) for tokens in forbidden]
    records["num_history"] = lens
    records["prompt_len"] = [draw.prompt_len for draw in draws]
    return [
        np.concatenate([p.bias_ids for p in prepared]),
        np.concatenate([p.allowed for p in prepared]),
        np.concatenate(forbidden),
        np.concatenate(history),
        np.concatenate([p.breakers for p in prepared]),
        np.concatenate([p.bias_values for p in prepared]),
    ]


def _heads(
    draws: Sequence[DrawRule], history_lens: Sequence[int]
) -> tuple[list[NDArray[np.int32]], list[int], list[bool]]:
    """Per draw: what it adds to the list of histories, how much of its history it sees, whether the next goes on."""
    lens = [min(len(d.history), n) if d.params.needs_history else 0 for d, n in zip(draws, history_lens, strict=True)]
    both = pairwise(zip(draws, lens, strict=True))
    goes_on = [*(a.history is b.history and 0 < n <= m for (a, n), (b, m) in both), False]
    heads = [
        _NO_INTS if more or not n else np.asarray(draw.history, np.int32)[:n]
        for draw, n, more in zip(draws, lens, goes_on, strict=True)
    ]
    return heads, lens, goes_on


def _forbidden(draw: DrawRule, history_len: int) -> NDArray[np.int32]:
    words = draw.params.bad_words_token_ids
    if not words and not draw.banned_token_ids:
        return _NO_INTS
    seen = draw.history[max(0, history_len - MAX_BAD_WORD_TOKENS) : history_len]  # as much as a word can look at
    return np.array(sorted(forbidden_tokens(seen, words, draw.banned_token_ids)), np.int32)
