"""Float weights to quantised blocks (``blocks.py`` draws them): nearest values for given scales, scales by search.

Rounding to f16 and to sub-scales comes before the integers are chosen, so that each is the nearest to what will be
read.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from octavo.weights.blocks import Bytes, Floats
from octavo.weights.dequantise import GROUP_LAYOUT, Encoding

_Ints = NDArray[np.int32]

_STRETCHES = (-0.6, -0.3, 0.0, 0.3, 0.6)  # of the integer range that a first scale spans: tried for the least error


def quantise(values: Floats, encoding: Encoding) -> Bytes:
    """values: float32, whole blocks in C order; returns the bytes of as many blocks, 1-D.

    ``ValueError`` for a value that is not finite or beyond f16, and for a size that is no whole number of blocks.
    """
    weights, _ = GROUP_LAYOUT[encoding]
    if values.size % weights:
        raise ValueError(f"{encoding} stores groups of {weights} weights but there are {values.size}")
    if not np.abs(values).max(initial=0.0) <= 65504:  # NaN too
        raise ValueError(f"{encoding} cannot hold a weight that is not finite or above 65504")
    return _TO_BLOCKS[encoding](values.reshape(-1, weights)).reshape(-1)


def _inverse(scale: Floats) -> Floats:
    """1 / scale, 0 for 0."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _half(x: Floats) -> tuple[Bytes, Floats]:
    """[B, 1] -> its f16 as bytes [B, 2], and what they are read as."""
    half = x.astype("<f2")
    return half.view(np.uint8), half.astype(np.float32)


def _integers(x: Floats, scale: Floats, low: int, high: int) -> _Ints:
    nearest: _Ints = np.clip(np.rint(x * _inverse(scale)), low, high).astype(np.int32)
    return nearest


def _pack_nibbles(q: _Ints, half: int) -> Bytes:
    """[B, n] of 0 to 15 -> [B, n / 2]: of every 2 ``half`` the first ones low, the others high."""
    pairs = (q & 15).astype(np.uint8).reshape(len(q), -1, 2, half)
    packed: Bytes = pairs[:, :, 0] | pairs[:, :, 1] << np.uint8(4)
    return packed.reshape(len(q), -1)


def _pack_bits(bits: _Ints) -> Bytes:
    """[B, n] of 0 and 1 -> [B, n / 8], lowest first."""
    return np.packbits(bits.astype(np.uint8), axis=1, bitorder="little")


def _extreme(x: Floats) -> Floats:
    """The value of the largest magnitude of each row, with its sign: [B, 1]."""
    extreme: Floats = np.take_along_axis(x, np.abs(x).argmax(1, keepdims=True), 1)
    return extreme


def _q8_0(x: Floats) -> Bytes:
    head, d = _half(np.abs(x).max(1, keepdims=True) / 127)
    return np.concatenate([head, _integers(x, d, -127, 127).astype(np.int8).view(np.uint8)], axis=1)


def _q4_0(x: Floats) -> Bytes:
    head, d = _half(_extreme(x) / np.float32(-8))
    return np.concatenate([head, _pack_nibbles(_integers(x, d, -8, 7) + 8, 16)], axis=1)


def _q5_0(x: Floats) -> Bytes:
    head, d = _half(_extreme(x) / np.float32(-16))
    q = _integers(x, d, -16, 15) + 16
    return np.concatenate([head, _pack_bits(q >> 4), _pack_nibbles(q, 16)], axis=1)


def _with_minimum(x: Floats, top: int) -> tuple[Bytes, Bytes, _Ints]:
    scale, minimum = _scale_and_minimum(x[:, None], top)
    head, d = _half(scale)
    low, m = _half(-minimum)
    return head, low, _integers(x - m, d, 0, top)


def _q4_1(x: Floats) -> Bytes:
    head, low, q = _with_minimum(x, 15)
    return np.concatenate([head, low, _pack_nibbles(q, 16)], axis=1)


def _q5_1(x: Floats) -> Bytes:
    head, low, q = _with_minimum(x, 31)
    return np.concatenate([head, low, _pack_bits(q >> 4), _pack_nibbles(q, 16)], axis=1)


def _scale_and_minimum(x: Floats, top: int) -> tuple[Floats, Floats]:
    """x [B, S, n] -> (scale, minimum) [B, S]: x is about scale * q - minimum, q from 0 to ``top``, minimum >= 0.

    Of some first scales, the least-squares fit to their integers with the least squared error.
    """
    lowest = np.minimum(x.min(2), 0)
    spread = x.max(2) - lowest
    best_scale, best_minimum, best_error = spread / np.float32(top), -lowest, np.full(spread.shape, np.inf, np.float32)
    total, count = x.sum(2), np.float32(x.shape[2])
    for stretch in _STRETCHES:
        q = np.clip(np.rint((x - lowest[:, :, None]) * _inverse(spread / (top + stretch))[:, :, None]), 0, top)
        q = q.astype(np.float32)
        sum_q, sum_qq, sum_qx = q.sum(2), (q * q).sum(2), (q * x).sum(2)
        determinant = count * sum_qq - sum_q * sum_q
        fitted = np.divide(
            count * sum_qx - sum_q * total, determinant, out=np.zeros_like(spread), where=determinant > 0
        )
        shift = np.minimum((total - fitted * sum_q) / count, 0)  # the minimum is stored without a sign
        squares = np.divide(sum_qx - shift * sum_q, sum_qq, out=np.zeros_like(spread), where=sum_qq > 0)
        fitted = np.where(shift < 0, fitted, squares)
        error = ((fitted[:, :, None] * q + shift[:, :, None] - x) ** 2).sum(2)
        better = (error < best_error) & (fitted >= 0)
        best_scale = np.where(better, fitted, best_scale)
        best_minimum = np.where(better, -shift, best_minimum)
        best_error = np.where(better, error, best_error)
    return best_scale, best_minimum


def _two_levels(x: Floats, top: int) -> tuple[Bytes, _Ints]:
    """Q4_K and Q5_K: (f16 scales and six-bit sub-scales, 16 bytes; integers [B, 256])."""
    parts = x.reshape(len(x), 8, 32)
    scale, minimum = _scale_and_minimum(parts, top)
    head, d = _half(scale.max(1, keepdims=True) / 63)
    low, d_minimum = _half(minimum.max(1, keepdims=True) / 63)
    sub, sub_minimum = _integers(scale, d, 0, 63), _integers(minimum, d_minimum, 0, 63)
    shifted = parts + (d_minimum * sub_minimum)[:, :, None]
    q = _integers(shifted, (d * sub)[:, :, None], 0, top).reshape(len(x), 256)
    first = sub[:, :4] | (sub[:, 4:] >> 4) << 6
    second = sub_minimum[:, :4] | (sub_minimum[:, 4:] >> 4) << 6
    third = sub[:, 4:] & 15 | (sub_minimum[:, 4:] & 15) << 4
    return np.concatenate([head, low, np.concatenate([first, second, third], axis=1).astype(np.uint8)], axis=1), q


def _q4_k(x: Floats) -> Bytes:
    head, q = _two_levels(x, 15)
    return np.concatenate([head, _pack_nibbles(q, 32)], axis=1)


def _q5_k(x: Floats) -> Bytes:
    head, q = _two_levels(x, 31)
    high = (q >> 4).reshape(len(q), 8, 32) << np.arange(8)[:, None]
    return np.concatenate([head, high.sum(1).astype(np.uint8), _pack_nibbles(q, 32)], axis=1)


def _q6_k(x: Floats) -> Bytes:
    parts = x.reshape(len(x), 16, 16)
    extreme = np.take_along_axis(parts, np.abs(parts).argmax(2)[:, :, None], 2)[:, :, 0]
    best, best_error = extreme / np.float32(-32), np.full(extreme.shape, np.inf, np.float32)
    for stretch in _STRETCHES:
        q = np.clip(np.rint(parts * _inverse(extreme / np.float32(-32 + stretch))[:, :, None]), -32, 31).astype(
            np.float32
        )
        squares = (q * q).sum(2)
        fitted = np.divide((q * parts).sum(2), squares, out=np.zeros_like(squares), where=squares > 0)
        error = ((fitted[:, :, None] * q - parts) ** 2).sum(2)
        best, best_error = np.where(error < best_error, fitted, best), np.minimum(error, best_error)
    tail, d = _half(_extreme(best) / np.float32(-128))
    sub = _integers(best, d, -128, 127)
    q6 = _integers(parts, (d * sub)[:, :, None], -32, 31).reshape(len(x), 256) + 32
    high = (q6 >> 4).reshape(len(x), 2, 4, 32) << np.array([0, 2, 4, 6])[:, None]
    planes = [_pack_nibbles(q6, 64), high.sum(2).astype(np.uint8).reshape(len(x), 64)]
    return np.concatenate([*planes, sub.astype(np.int8).view(np.uint8), tail], axis=1)


def _f16(x: Floats) -> Bytes:
    return x.astype("<f2").view(np.uint8)


_TO_BLOCKS: dict[Encoding, Callable[[Floats], Bytes]] = {
    "F16": _f16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
