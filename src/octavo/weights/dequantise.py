"""What the bytes of an encoded tensor mean, written out. Every backend's unpack(pack(t)) must equal this bit for bit.

Quantised encodings store blocks of 32 or 256 weights along K; ``blocks.py`` draws them. Products of scales and integers
are exact in float32, so a fused multiply-add and a multiply followed by an add agree.
"""

from __future__ import annotations

from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from octavo.weights.blocks import TAKE_APART

# fmt: off
Encoding = Literal[
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0",
]
# fmt: on

GROUP = 32  # weights that kernels take at a time: of every quantised encoding, blocks are one such group or eight

#: encoding -> (weights per block, bytes per block)
GROUP_LAYOUT: dict[Encoding, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
}

_SLICE = 1 << 17  # weights converted at a time: 512 KiB of float32, so that the passes stay in the L2 cache


def encoded_bytes(encoding: Encoding, shape: tuple[int, ...]) -> int:
    """Size of a tensor in bytes. ``ValueError`` if the last dimension is not a whole number of blocks."""
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
    weights, size = GROUP_LAYOUT[encoding]
    blocks = data.reshape(-1, size)
    out = np.empty((len(blocks), weights), np.float32)
    step = _SLICE // weights
    for start in range(0, len(blocks), step):
        out[start : start + step] = TAKE_APART[encoding](blocks[start : start + step]).weights()
    return out.reshape(shape)
