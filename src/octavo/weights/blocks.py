"""Blocks of quantised weights taken apart: integers, scales and minima, whatever the encoding.

GGML's block formats (https://github.com/ggml-org/ggml, ggml-common.h and ggml-quants.c; all fields little-endian). B
blocks, each of W weights that share one or two f16 numbers; S sub-blocks of it may have scales (and minima) of their
own, of a few bits each:

    weight = scale * q + minimum        scale = d * (sub-scale), minimum = m or -(dmin * (sub-minimum))

Every such product is exact in float32 (11 bits of f16, 8 of a sub-scale, 5 to 8 of q that are never all wide), so that
nothing but the addition of a minimum rounds, and no order of multiplications matters.

    Q8_0, Q4_0, Q4_1, Q5_0, Q5_1   W 32:  d, m (_1), high bits (5), nibbles (byte j: weight j low, j + 16 high)
    Q2_K .. Q6_K                   W 256: S 16 with sub-scales of 4, 6, 8 bits (Q2, Q3, Q6), or 8 of 6 bits (Q4, Q5)
    IQ4_NL, IQ4_XS                 nibbles are indices of 16 levels; XS: W 256, S 8 with sub-scales of 6 bits
    IQ1 .. IQ3                     W 256: indices of a codebook of 8 or 4 weights, signs; S 8 or 16
    TQ1_0, TQ2_0                   W 256: weights of -1, 0, 1, five in a byte as digits of base 3, or two bits each

Of IQ1 to IQ3 the integers and sub-scales are those of d / 8, so that the halves and eighths in their definitions are
whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.weights.codebooks import IQ4_LEVELS, Codebook, codebook, sign_patterns

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Ints = NDArray[np.int8]

EIGHTH = np.float32(0.125)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """B blocks of W weights in S sub-blocks, each of W / S neighbours: weight = scale * q + minimum."""

    d: Floats  # [B, 1]
    sub: Ints | None  # [B, S] sub-scales; None: S is 1 and the scale is d
    q: Ints  # [B, W]
    minimum: Floats | None = None  # [B, S]

    def weights(self) -> Floats:
        """[B, W] float32"""
        scale = self.d if self.sub is None else self.d * self.sub
        out = self.q.reshape(*scale.shape, -1).astype(np.float32)
        out *= scale[:, :, None]
        if self.minimum is not None:
            out += self.minimum[:, :, None]
        return out.reshape(self.q.shape)


def _f16(blocks: Bytes, start: int) -> Floats:
    """The f16 number at byte ``start`` of each block: [B, 1]."""
    return blocks[:, start : start + 2].copy().view("<f2").astype(np.float32)


def _words(blocks: Bytes, start: int, end: int, dtype: str) -> NDArray[np.uint32]:
    """Bytes [start, end) of each block as little-endian numbers, widened to 32 bits."""
    return blocks[:, start:end].copy().view(dtype).astype(np.uint32)


def _nibbles(data: Bytes, half: int) -> Ints:
    """[B, n] bytes -> [B, 2 n]: of every ``half`` bytes first the low halves, then the high ones."""
    parts = data.reshape(len(data), -1, 1, half) >> np.array([0, 4], np.uint8)[:, None] & 15
    return parts.reshape(len(data), -1).view(np.int8)


def _crumbs(data: Bytes) -> Ints:
    """[B, n] bytes -> [B, 4 n]: two bits each, of every 32 bytes first the lowest of all."""
    parts = data.reshape(len(data), -1, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return parts.reshape(len(data), -1).view(np.int8)


def _bits(data: Bytes) -> Ints:
    """[B, n] bytes -> [B, 8 n] of 0 and 1, lowest bit first."""
    return np.unpackbits(data, axis=1, bitorder="little").view(np.int8)


def _signs(data: Bytes) -> Ints:
    """[B, n] bytes -> [B, 8 n]: -1 where the bit is set, else 1."""
    return 1 - 2 * _bits(data)


def _q8_0(b: Bytes) -> Blocks:
    return Blocks(d=_f16(b, 0), sub=None, q=b[:, 2:].view(np.int8))


def _q4_0(b: Bytes) -> Blocks:
    return Blocks(d=_f16(b, 0), sub=None, q=_nibbles(b[:, 2:], 16) - 8)


def _q4_1(b: Bytes) -> Blocks:
    return Blocks(d=_f16(b, 0), sub=None, q=_nibbles(b[:, 4:], 16), minimum=_f16(b, 2))


def _q5_0(b: Bytes) -> Blocks:
    return Blocks(d=_f16(b, 0), sub=None, q=(_nibbles(b[:, 6:], 16) | _bits(b[:, 2:6]) << 4) - 16)


def _q5_1(b: Bytes) -> Blocks:
    q = _nibbles(b[:, 8:], 16) | _bits(b[:, 4:8]) << 4
    return Blocks(d=_f16(b, 0), sub=None, q=q, minimum=_f16(b, 2))


def _q2_k(b: Bytes) -> Blocks:
    scales = b[:, :16]
    minimum = -(_f16(b, 82) * (scales >> 4))
    return Blocks(d=_f16(b, 80), sub=(scales & 15).view(np.int8), q=_crumbs(b[:, 16:80]), minimum=minimum)


def _q3_k(b: Bytes) -> Blocks:
    """The high bit of weight 32 i + j is bit i of byte j. Sub-scales: 8 bytes of nibbles, 4 of the upper two bits."""
    high = (b[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(len(b), 256).view(np.int8)
    low = np.concatenate([b[:, 96:104] & 15, b[:, 96:104] >> 4], axis=1)
    upper = (b[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(len(b), 16)
    sub = (low | upper << 4).view(np.int8) - 32
    return Blocks(d=_f16(b, 108), sub=sub.astype(np.int8), q=(_crumbs(b[:, 32:96]) | high << 2) - 4)


def _six_bit_pairs(b: Bytes) -> tuple[Ints, NDArray[np.uint8]]:
    """Sub-scales and sub-minima [B, 8] of Q4_K and Q5_K, 6 bits each in bytes 4 to 16."""
    first, second, third = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scales.view(np.int8), minima


def _q4_k(b: Bytes) -> Blocks:
    sub, minima = _six_bit_pairs(b)
    return Blocks(d=_f16(b, 0), sub=sub, q=_nibbles(b[:, 16:], 32), minimum=-(_f16(b, 2) * minima))


def _q5_k(b: Bytes) -> Blocks:
    sub, minima = _six_bit_pairs(b)
    high = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(len(b), 256).view(np.int8)
    q = _nibbles(b[:, 48:], 32) | high << 4
    return Blocks(d=_f16(b, 0), sub=sub, q=q, minimum=-(_f16(b, 2) * minima))


def _q6_k(b: Bytes) -> Blocks:
    low = _nibbles(b[:, :128], 64)  # of every 64 bytes: 64 weights low, the next 64 high
    q = (low | _crumbs(b[:, 128:192]) << 4) - 32
    return Blocks(d=_f16(b, 208), sub=b[:, 192:208].view(np.int8), q=q)


def _iq4_nl(b: Bytes) -> Blocks:
    return Blocks(d=_f16(b, 0), sub=None, q=IQ4_LEVELS[_nibbles(b[:, 2:], 16)])


def _iq4_xs(b: Bytes) -> Blocks:
    high = _words(b, 2, 4, "<u2") >> np.arange(0, 16, 2, dtype=np.uint32) & 3
    low = (b[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(len(b), 8)
    sub = (low | high << 4).astype(np.int8) - 32
    return Blocks(d=_f16(b, 0), sub=sub.astype(np.int8), q=IQ4_LEVELS[_nibbles(b[:, 8:], 16)])


def _tq1_0(b: Bytes) -> Blocks:
    """Digits of base 3, the highest first: 32 bytes of five weights each, 16 of five, 4 of four."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    parts = (b[:, None, :32] * powers, b[:, None, 32:48] * powers, b[:, None, 48:52] * powers[:4])
    shifted = np.concatenate([part.reshape(len(b), -1) for part in parts], axis=1)
    q = (shifted.astype(np.uint16) * 3 >> 8).astype(np.int8) - 1
    return Blocks(d=_f16(b, 52), sub=None, q=q.astype(np.int8))


def _tq2_0(b: Bytes) -> Blocks:
    return Blocks(d=_f16(b, 64), sub=None, q=_crumbs(b[:, :64]) - 1)


def _from_codebook(name: Codebook, indices: NDArray[np.integer]) -> Ints:
    """[B, n] indices -> [B, n * weights of an entry]."""
    entries: Ints = codebook(name)[indices]
    return entries.reshape(len(indices), -1)


def _scale_nibbles(data: Bytes) -> Ints:
    """[B, n] bytes of two sub-scales s each -> [B, 2 n] of 2 s + 1."""
    return (2 * (data[:, :, None] >> np.array([0, 4], np.uint8) & 15) + 1).reshape(len(data), -1).view(np.int8)


def _packed_signs(words: NDArray[np.uint32]) -> Ints:
    """[B, n] words of four times seven bits -> [B, 32 n] signs."""
    seven = words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32) & 127
    signs: Ints = sign_patterns()[seven]
    return signs.reshape(len(words), -1)


def _iq2_xxs(b: Bytes) -> Blocks:
    words = _words(b, 2, 66, "<u4").reshape(len(b), 8, 2)
    indices = b[:, 2:66].reshape(len(b), 8, 8)[:, :, :4].reshape(len(b), 32)
    q = _from_codebook("IQ2_XXS", indices) * _packed_signs(words[:, :, 1])
    return Blocks(d=_f16(b, 0) * EIGHTH, sub=(2 * (words[:, :, 1] >> 28) + 1).astype(np.int8), q=q)


def _iq2_xs(b: Bytes) -> Blocks:
    words = _words(b, 2, 66, "<u2")
    signs = sign_patterns()[words >> 9].reshape(len(b), -1)
    return Blocks(
        d=_f16(b, 0) * EIGHTH, sub=_scale_nibbles(b[:, 66:74]), q=_from_codebook("IQ2_XS", words & 511) * signs
    )


def _iq2_s(b: Bytes) -> Blocks:
    high = (b[:, 66:74, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(len(b), 32)
    indices = b[:, 2:34] | high.astype(np.uint16) << 8
    q = _from_codebook("IQ2_S", indices) * _signs(b[:, 34:66])
    return Blocks(d=_f16(b, 0) * EIGHTH, sub=_scale_nibbles(b[:, 74:82]), q=q)


def _iq3_xxs(b: Bytes) -> Blocks:
    words = _words(b, 66, 98, "<u4")
    q = _from_codebook("IQ3_XXS", b[:, 2:66]) * _packed_signs(words)
    return Blocks(d=_f16(b, 0) * EIGHTH, sub=(4 * (words >> 28) + 2).astype(np.int8), q=q)


def _iq3_s(b: Bytes) -> Blocks:
    indices = b[:, 2:66] | _bits(b[:, 66:74]).astype(np.uint16) << 8
    q = _from_codebook("IQ3_S", indices) * (8 * _signs(b[:, 74:106]))
    return Blocks(d=_f16(b, 0) * EIGHTH, sub=_scale_nibbles(b[:, 106:110]), q=q)


def _iq1_s(b: Bytes) -> Blocks:
    """Weights are -1, 0, 1 and an eighth up or down."""
    words = _words(b, 34, 50, "<u2")
    high = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint32) & 7).reshape(len(b), 32)
    shift = np.where(words & 0x8000, -1, 1).astype(np.int8).repeat(32, axis=1)
    q = 8 * _from_codebook("IQ1", b[:, 2:34] | high << 8) + shift
    return Blocks(d=_f16(b, 0) * EIGHTH, sub=(2 * (words >> 12 & 7) + 1).astype(np.int8), q=q.astype(np.int8))


def _iq1_m(b: Bytes) -> Blocks:
    """The f16 scale lies in four pieces, in the upper four bits of the words of sub-scales."""
    words = _words(b, 48, 56, "<u2")
    d = (words >> 12 << np.array([0, 4, 8, 12], np.uint32)).sum(1, keepdims=True).astype("<u2")
    high = (b[:, 32:48, None] >> np.array([0, 4], np.uint8) & 15).reshape(len(b), 32)
    shift = np.where(high & 8, -1, 1).astype(np.int8).repeat(8, axis=1)
    q = 8 * _from_codebook("IQ1", b[:, :32] | (high & 7).astype(np.uint16) << 8) + shift
    sub = 2 * (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint32) & 7) + 1
    return Blocks(
        d=d.view("<f2").astype(np.float32) * EIGHTH, sub=sub.reshape(len(b), 16).astype(np.int8), q=q.astype(np.int8)
    )


#: encoding -> how [B, bytes of a block] is taken apart
TAKE_APART: dict[str, Callable[[Bytes], Blocks]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}
