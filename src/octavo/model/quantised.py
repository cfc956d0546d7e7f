"""A wide model packed on the way: ``--quantize`` at load, and ``octavo convert`` into a file.

Matrices of F32, F16 and BF16 become the format that is asked for; norms and biases stay. As llama-quantize does, the
head (also one that is the embedding) gets Q6_K unless Q8_0 is asked for, and rows that are no multiple of 256 get the
32-wide format of the same size or the next: Q4_K Q5_0, Q5_K Q5_1, Q6_K Q8_0. Rows that are no multiple of 32 become
F16.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from octavo.core.config import QuantizeFormat
from octavo.core.errors import ModelFileError
from octavo.model.registry import find_architecture
from octavo.model.weight_source import WeightSource
from octavo.weights.dequantise import GROUP_LAYOUT, Encoding, dequantise, encoded_bytes
from octavo.weights.quantise import quantise
from octavo.weights.tensor import WeightTensor

WIDE: tuple[Encoding, ...] = ("F32", "F16", "BF16")
_SLICE = 1 << 20  # weights that are float32 at a time
_NARROW: dict[Encoding, Encoding] = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def encoding_of(wanted: QuantizeFormat) -> Encoding:
    """The encoding that the option names."""
    return wanted.upper()  # type: ignore[return-value]


def format_for(wanted: Encoding, stored: Encoding, shape: tuple[int, ...], *, is_head: bool) -> Encoding:
    """What a tensor of ``stored`` becomes."""
    if stored not in WIDE or len(shape) != 2:
        return stored
    chosen: Encoding = "Q6_K" if is_head and wanted != "Q8_0" else wanted
    if shape[-1] % GROUP_LAYOUT[chosen][0]:
        chosen = _NARROW.get(chosen, chosen)
    return chosen if shape[-1] % GROUP_LAYOUT[chosen][0] == 0 else "F16"


def quantised_rows(tensor: WeightTensor, encoding: Encoding) -> NDArray[np.uint8]:
    """The tensor's bytes in another encoding, 1-D; ``ModelFileError`` for weights that it cannot hold."""
    rows, columns = tensor.shape
    step = max(1, _SLICE // columns)
    row_bytes, out_bytes = encoded_bytes(tensor.encoding, (columns,)), encoded_bytes(encoding, (columns,))
    out = np.empty(rows * out_bytes, np.uint8)
    for first in range(0, rows, step):
        end = min(rows, first + step)
        taken = tensor.data[first * row_bytes : end * row_bytes]
        try:
            blocks = quantise(dequantise(taken, tensor.encoding, (end - first, columns)), encoding)
        except ValueError as error:
            raise ModelFileError(f"tensor {tensor.name}: {error}") from error
        out[first * out_bytes : end * out_bytes] = blocks
    return out


class QuantisedWeights(WeightSource):
    """Another source whose wide matrices are packed when they are asked for."""

    def __init__(self, source: WeightSource, wanted: QuantizeFormat) -> None:
        self.config, self._source, self._wanted = source.config, source, wanted
        self.fingerprint = f"{source.fingerprint}-{wanted}"
        specs = find_architecture(source.config.architecture).tensors(source.config)
        self._heads = {name for name, spec in specs.items() if "head" in spec.uses}

    def names(self) -> Iterable[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def encoding(self, name: str) -> Encoding:
        stored, is_head = self._source.encoding(name), name in self._heads
        return format_for(encoding_of(self._wanted), stored, self.shape(name), is_head=is_head)

    def tensor(self, name: str) -> WeightTensor:
        tensor, encoding = self._source.tensor(name), self.encoding(name)
        if encoding == tensor.encoding:
            return tensor
        return WeightTensor(name=name, shape=tensor.shape, encoding=encoding, data=quantised_rows(tensor, encoding))

    def notes(self) -> Iterator[str]:
        """What became of the matrices, for the start table."""
        count = Counter(self.encoding(name) for name in self.names() if len(self.shape(name)) == 2)
        yield f"weights: packed to {self._wanted}: " + ", ".join(f"{n} of {e}" for e, n in count.most_common())

    def close(self) -> None:
        self._source.close()
