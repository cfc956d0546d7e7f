"""What the bytes of an encoded tensor mean, written out. Every backend's unpack(pack(t)) must equal this bit for bit.

Quantised encodings store groups of 32 weights along K. Layouts (GGML's block formats; all fields little-endian):

    Q8_0   34 bytes: f16 scale d, 32 x i8 q                          weight = d * q
    Q4_0   18 bytes: f16 scale d, 16 bytes of nibbles q              weight = d * (q - 8)
    Q4_1   20 bytes: f16 scale d, f16 minimum m, 16 bytes of q       weight = d * q + m

Byte j of the nibbles holds weight j in its low half and weight j + 16 in its high half. d * q is exact in float32
(11 + 8 bits of mantissa at most), so a fused multiply-add and a multiply followed by an add agree.
"""

from __future__ import annotations

from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Encoding = Literal["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"]

GROUP = 32  # weights per group of every quantised encoding

#: encoding -> (weights per group, bytes per group)
GROUP_LAYOUT: dict[Encoding, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (GROUP, 34),
    "Q4_0": (GROUP, 18),
    "Q4_1": (GROUP, 20),
}

_SLICE = 4096  # groups converted at a time: 512 KiB of float32, so that the passes over a slice stay in the L2 cache


def encoded_bytes(encoding: Encoding, shape: tuple[int, ...]) -> int:
    """Size of a tensor in bytes. ``ValueError`` if the last dimension is not a whole number of groups."""
    weights, size = GROUP_LAYOUT[encoding]
    if shape and shape[-1] % weights:
        raise ValueError(f"{encoding} stores groups of {weights} weights but a row has {shape[-1]}")
    return prod(shape) // weights * size


def dequantise(data: NDArray[np.uint8], encoding: Encoding, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Decode a tensor.

    data:    [encoded_bytes(encoding, shape)] uint8, C-contiguous, any alignment
    returns: ``shape`` float32, a new array
    raises:  ``ValueError`` if the size of ``data`` does not fit ``shape``
    """
    expected = encoded_bytes(encoding, shape)
    if data.ndim != 1 or data.dtype != np.uint8 or data.size != expected:
        raise ValueError(
            f"{encoding} of shape {shape} takes {expected} bytes (1-D uint8), got {data.dtype} {data.shape}"
        )
    if encoding == "F32":
        return data.view("<f4").astype(np.float32).reshape(shape)
    if encoding == "F16":
        return data.view("<f2").astype(np.float32).reshape(shape)
    if encoding == "BF16":
        # the upper half of a float32
        bits: NDArray[np.uint32] = np.left_shift(data.view("<u2"), 16, dtype=np.uint32)
        return bits.view(np.float32).reshape(shape)
    groups = data.reshape(-1, GROUP_LAYOUT[encoding][1])
    out = np.empty((len(groups), GROUP), np.float32)
    for start in range(0, len(groups), _SLICE):
        _dequantise_groups(groups[start : start + _SLICE], encoding, out[start : start + _SLICE])
    return out.reshape(shape)


def _dequantise_groups(groups: NDArray[np.uint8], encoding: Encoding, out: NDArray[np.float32]) -> None:
    """groups: [G, bytes per group]; out: [G, 32] float32, filled."""
    scale = _f16_column(groups, 0)
    if encoding == "Q8_0":
        np.multiply(groups[:, 2:].view(np.int8), scale, out=out)
        return
    nibbles = groups[:, -16:]
    np.copyto(out[:, :16], nibbles & 0x0F)
    np.copyto(out[:, 16:], nibbles >> 4)
    if encoding == "Q4_0":
        out -= 8
    out *= scale
    if encoding == "Q4_1":
        out += _f16_column(groups, 2)


def _f16_column(groups: NDArray[np.uint8], start: int) -> NDArray[np.float32]:
    """The f16 number at byte ``start`` of each group: [G, 1] float32."""
    return groups[:, start : start + 2].copy().view("<f2").astype(np.float32)
