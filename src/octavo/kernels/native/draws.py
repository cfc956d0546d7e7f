"""What the C++ sampler needs to know of each draw, as one structured array and a few ragged lists.

``SamplingParams`` stay the same object for a whole request, so their half of the record is made once and kept.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.core.sampling_params import SamplingParams
from octavo.kernels.base import Draw
from octavo.kernels.reference.sampling import MIN_TEMPERATURE, forbidden_tokens

#: Mirrors ``DrawParams`` in csrc/sampling.h.
DRAW_DTYPE = np.dtype(
    [
        ("stream", "<u8"),
        ("position", "<i8"),
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
        ("padding", "<i4"),
    ]
)
#: What differs between two draws of a plain request: the leading fields, ``stream`` and ``position``.
_HEAD = struct.Struct("<Qq")
_RECORD = struct.Struct(f"{_HEAD.format}{DRAW_DTYPE.itemsize - _HEAD.size}s")
_NO_INTS = np.zeros(0, np.int32)
_KEPT = 4096  # parameter sets remembered


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The half of a record that depends on the parameters alone."""

    params: SamplingParams  # kept alive, so that its id stays its own
    tail: bytes  # of the record, after ``_HEAD``
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    allowed: NDArray[np.int32]
    breakers: NDArray[np.int32]
    plain: bool  # neither lists nor history


@dataclass(slots=True)
class PackedDraws:
    """Arguments of ``_native.Program.run``."""

    records: bytearray  # of DRAW_DTYPE
    #: Bias ids, allowed, forbidden, history, breakers, bias values: of one draw after the other; [] if none has any.
    lists: list[NDArray[np.int32] | NDArray[np.float32]]


class DrawPacker:
    """Turns draws into arrays; remembers what it knows of their parameters."""

    def __init__(self) -> None:
        self._prepared: dict[int, _Prepared] = {}

    def pack(self, draws: Sequence[Draw]) -> PackedDraws:
        """One record per draw; plain draws cost one lookup and one copy of 136 bytes each."""
        records, plain = bytearray(), True
        prepared: list[_Prepared] = []
        for draw in draws:
            half = self._prepared.get(id(draw.params)) or self._prepare(draw.params)
            prepared.append(half)
            records += _RECORD.pack(draw.stream, draw.position, half.tail)
            if draw.banned_token_ids or not half.plain:
                plain = False
        return PackedDraws(records, []) if plain else _with_lists(records, draws, prepared)

    def _prepare(self, params: SamplingParams) -> _Prepared:
        if len(self._prepared) >= _KEPT:
            self._prepared.clear()
        made = self._prepared[id(params)] = _prepare(params)
        return made


def _prepare(params: SamplingParams) -> _Prepared:
    record = np.zeros(1, DRAW_DTYPE)
    for name in ("typical_p", "top_p", "min_p", "xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base"):
        record[name] = getattr(params, name)
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        record[name] = getattr(params, name)
    for name in ("top_k", "dry_allowed_length", "dry_penalty_last_n"):
        record[name] = getattr(params, name)
    record["temperature"] = 0.0 if params.greedy else max(params.temperature, MIN_TEMPERATURE)
    record["num_logprobs"] = -1 if params.logprobs is None else params.logprobs
    bias: dict[int, float] = {}
    for token, value in params.logit_bias:  # several for one token add up first
        bias[token] = bias.get(token, 0.0) + value
    record["num_bias"] = len(bias)
    record["has_allowed"] = params.allowed_token_ids is not None
    record["num_allowed"] = len(params.allowed_token_ids or ())
    breakers = params.dry_sequence_breaker_ids if params.dry_multiplier > 0.0 else ()
    record["num_breakers"] = len(breakers)
    return _Prepared(
        params,
        record.tobytes()[_HEAD.size :],
        np.array(list(bias), np.int32),
        np.array(list(bias.values()), np.float32),
        np.array(params.allowed_token_ids or (), np.int32),
        np.array(breakers, np.int32),
        plain=not (bias or params.allowed_token_ids is not None or breakers or params.needs_history),
    )


def _with_lists(buffer: bytearray, draws: Sequence[Draw], prepared: Sequence[_Prepared]) -> PackedDraws:
    records = np.frombuffer(buffer, DRAW_DTYPE)
    forbidden = [_forbidden(draw) for draw in draws]
    history = [np.asarray(d.history, np.int32) if d.params.needs_history else _NO_INTS for d in draws]
    records["num_forbidden"] = [len(tokens) for tokens in forbidden]
    records["num_history"] = [len(tokens) for tokens in history]
    records["prompt_len"] = [draw.prompt_len for draw in draws]
    lists: list[NDArray[np.int32] | NDArray[np.float32]] = [
        np.concatenate([p.bias_ids for p in prepared]),
        np.concatenate([p.allowed for p in prepared]),
        np.concatenate(forbidden),
        np.concatenate(history),
        np.concatenate([p.breakers for p in prepared]),
        np.concatenate([p.bias_values for p in prepared]),
    ]
    return PackedDraws(buffer, lists)


def _forbidden(draw: Draw) -> NDArray[np.int32]:
    words = draw.params.bad_words_token_ids
    if not words and not draw.banned_token_ids:
        return _NO_INTS
    return np.array(sorted(forbidden_tokens(draw.history, words, draw.banned_token_ids)), np.int32)
