"""A tensor as a file stores it: the hand-over from the weight readers to the backends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.weights.dequantise import Encoding, dequantise


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTensor:
    """One tensor as it lies in the file: nothing is copied or converted until somebody asks.

    Quantised encodings group 32 weights along the last dimension (K); ``data`` then holds whole rows of groups.
    """

    name: str  # canonical, as in an architecture's ``names``
    shape: tuple[int, ...]  # row-major: a linear layer is [out_features (N), in_features (K)]
    encoding: Encoding
    data: NDArray[np.uint8]  # 1-D, the bytes of the file, usually memory-mapped

    def to_float32(self) -> NDArray[np.float32]:
        """Dequantise: the written-out truth that every backend's unpack(pack(t)) must equal bit for bit."""
        return dequantise(self.data, self.encoding, self.shape)
