"""Encodings without kernels of their own, repacked without loss: int8 with a scale per 16 and an f16 per 256 (I8_K).

    I8_K   274 bytes: f16 d, 16 x i8 sub-scale, 256 x i8 q              weight = d / 8 * sub-scale * q

Codebooks of IQ1 to IQ3 are int8 numbers in eighths, and so is every sub-scale in its halves: nothing is rounded. No
file has this encoding.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.weights.blocks import EIGHTH, TAKE_APART
from octavo.weights.dequantise import GROUP_LAYOUT, Encoding

REPACKED: tuple[Encoding, ...] = (
    "IQ1_S",
    "IQ1_M",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "TQ1_0",
    "TQ2_0",
)
I8_K_BYTES = 274  # of 256 weights


def to_i8_k(data: NDArray[np.uint8], encoding: Encoding) -> NDArray[np.uint8]:
    """Whole blocks of one of ``REPACKED``, 1-D -> as many of I8_K, 1-D."""
    blocks = TAKE_APART[encoding](data.reshape(-1, GROUP_LAYOUT[encoding][1]))
    out = np.empty((len(blocks.q), I8_K_BYTES), np.uint8)
    if blocks.sub is None:  # TQ: weights of -1, 0, 1 (and 2, of bits that no file has) times d
        d, q = blocks.d, blocks.q * np.int8(8)
        out[:, 2:18] = 1
    else:
        d, q = blocks.d / EIGHTH, blocks.q
        out[:, 2:18] = blocks.sub.view(np.uint8).repeat(16 // blocks.sub.shape[1], axis=1)
    out[:, :2] = d.astype("<f2").view(np.uint8)
    out[:, 18:] = q.view(np.uint8)
    return out.reshape(-1)
