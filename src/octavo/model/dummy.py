"""Random weights in the shape of any model, without a file of weights: for measuring speed, never for text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import sha256
from math import log2, prod
from pathlib import Path
from typing import cast
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from octavo.core.config import DummyFormat
from octavo.core.errors import ModelFileError
from octavo.core.model_config import ModelConfig
from octavo.model.gguf_model import read_gguf_config
from octavo.model.hf_model import read_hf_config
from octavo.model.registry import find_architecture
from octavo.model.weight_source import WeightSource
from octavo.weights.blocks import TAKE_APART
from octavo.weights.dequantise import GROUP_LAYOUT, encoded_bytes
from octavo.weights.gguf_file import GGUFFile
from octavo.weights.mapped_file import confined, read_small
from octavo.weights.strict_json import MAX_JSON_BYTES, parse_object
from octavo.weights.tensor import WeightTensor

_SLICE = 1 << 18  # values made at a time, so that the passes over a slice stay in the L2 cache
#: Standard deviation of a uniformly random integer of the encoding; of others it is measured.
_INTEGER_STD: dict[DummyFormat, float] = {"Q8_0": 73.9, "Q4_0": 4.61, "Q4_1": 4.61}
#: Where a block has its f16 scale, if not at its beginning; where that of its minima, and how many scales it is.
_SCALES_AT: dict[DummyFormat, tuple[int, int | None, float]] = {
    "Q4_1": (0, 2, -7.5),
    "Q5_1": (0, 2, -15.5),
    "Q2_K": (80, 82, 1.5),
    "Q3_K": (108, None, 0.0),
    "Q4_K": (0, 2, 7.5),
    "Q5_K": (0, 2, 15.5),
    "Q6_K": (208, None, 0.0),
    "TQ1_0": (52, None, 0.0),
    "TQ2_0": (64, None, 0.0),
}
_INT16_STD = 2.0**16 / 12**0.5
_BF16_STD = 1.208  # of signed values of [0.5, 1) and [1, 2), as many of each


class DummyWeights(WeightSource):
    """Tensors that are made when they are asked for, the same ones each time: nothing but the one asked for is held.

    encoding: of the matrices; norms and biases are F32
    metadata: of the GGUF file that gave the shape, for its tokenizer; {} if it was a config.json

    Matrices have mean 0 and a standard deviation of about 1 / sqrt(K), so that activations stay near 1.
    """

    def __init__(
        self,
        config: ModelConfig,
        encoding: DummyFormat = "BF16",
        *,
        seed: int = 0,
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        self.config, self.metadata = config, metadata or {}
        self._encoding = encoding
        self._seed = seed
        self._specs = find_architecture(config.architecture).tensors(config)
        self.fingerprint = sha256(f"dummy {encoding} {seed} {config}".encode()).hexdigest()[:16]

    def names(self) -> Iterable[str]:
        return self._specs.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._specs:
            raise ModelFileError(f"{self.config.name} has no tensor {name!r}")
        return self._specs[name].shape

    def encoding(self, name: str) -> DummyFormat:
        """How the tensor is stored."""
        return "F32" if len(self.shape(name)) == 1 else self._encoding

    def tensor(self, name: str) -> WeightTensor:
        shape, encoding = self.shape(name), self.encoding(name)
        rng = np.random.Generator(np.random.SFC64([self._seed, crc32(name.encode())]))
        if len(shape) == 1:
            around = 1.0 if "norm" in self._specs[name].uses else 0.0
            data = (around + rng.uniform(-0.1, 0.1, shape)).astype("<f4").view(np.uint8)
        else:
            data = random_matrix(rng, cast(tuple[int, int], shape), encoding)
        return WeightTensor(name=name, shape=shape, encoding=encoding, data=data)

    def close(self) -> None:
        """Nothing is open."""


def open_dummy(path: Path, encoding: DummyFormat) -> DummyWeights:
    """Random weights in the shape that ``path`` describes: a folder with config.json, or a GGUF file's metadata.

    Whatever weights lie there are not read. Raises ``ModelFileError`` for what describes no model.
    """
    if path.is_dir():
        where = path / "config.json"
        if not where.exists():
            raise ModelFileError(f"{path} has no config.json to take a shape from")
        fields = parse_object(read_small(confined(path, where.name), MAX_JSON_BYTES), str(where))
        return DummyWeights(read_hf_config(fields, str(where), path.resolve().name), encoding)
    file = GGUFFile(path)
    try:
        return DummyWeights(read_gguf_config(file), encoding, metadata=file.metadata)
    finally:
        file.close()


def random_matrix(rng: np.random.Generator, shape: tuple[int, int], encoding: DummyFormat) -> NDArray[np.uint8]:
    """The bytes of a random matrix [N, K], standard deviation about 1 / sqrt(K).

    F32 takes 65,536 values from a uniform distribution. BF16 has random signs and mantissas and two exponents, so that
    its deviation is right within a factor of sqrt(2). Quantised ones have random integers, and scales that differ by
    up to a quarter.
    """
    try:
        data = np.empty(encoded_bytes(encoding, shape), np.uint8)
    except ValueError as error:
        raise ModelFileError(f"a matrix {shape} cannot be {encoding}: {error}") from error
    size = shape[1] ** -0.5
    if encoding == "F32":
        floats = data.view("<f4")
        for start in range(0, prod(shape), _SLICE):
            part = floats[start : start + _SLICE]
            np.multiply(_random_bytes(rng, 2 * part.size).view("<i2"), np.float32(size / _INT16_STD), out=part)
        return data
    for start in range(0, data.size, _SLICE):
        data[start : start + _SLICE] = _random_bytes(rng, min(_SLICE, data.size - start))
    if encoding == "BF16":
        bits = data.view("<u2")
        bits &= 0x80FF  # sign, one bit to be added to the exponent, mantissa
        bits += (126 + round(log2(size / _BF16_STD))) << 7
        return data
    blocks = data.reshape(-1, GROUP_LAYOUT[encoding][1])
    scales = (size / _integer_std(encoding) * np.linspace(0.75, 1.25, 256)).astype("<f2")
    _set_scales(blocks, encoding, scales[blocks[:, 0]])
    return data


def _set_scales(blocks: NDArray[np.uint8], encoding: DummyFormat, chosen: NDArray[np.float16]) -> None:
    """Give each block its f16 scale, and the f16 of its minima such that random weights have mean 0."""
    words = chosen.view("<u2")
    if encoding == "IQ1_M":  # in four pieces of four bits
        for i in range(4):
            blocks[:, 49 + 2 * i] = blocks[:, 49 + 2 * i] & 15 | (words >> 4 * i & 15).astype(np.uint8) << 4
        return
    at, minimum_at, minimum = _SCALES_AT.get(encoding, (0, None, 0.0))
    blocks[:, at : at + 2] = chosen.view(np.uint8).reshape(-1, 2)
    if minimum_at is not None:
        minima = (chosen * np.float16(minimum)).astype("<f2")
        blocks[:, minimum_at : minimum_at + 2] = minima.view(np.uint8).reshape(-1, 2)


@cache
def _integer_std(encoding: DummyFormat) -> float:
    """Standard deviation of random weights of the encoding whose scale is 1."""
    if encoding in _INTEGER_STD:
        return _INTEGER_STD[encoding]
    blocks = np.random.default_rng(0).integers(0, 256, (1024, GROUP_LAYOUT[encoding][1]), np.uint8)
    _set_scales(blocks, encoding, np.ones(len(blocks), "<f2"))
    return float(TAKE_APART[encoding](blocks).weights().std())


def _random_bytes(rng: np.random.Generator, count: int) -> NDArray[np.uint8]:
    return rng.integers(0, 1 << 64, -(-count // 8), np.uint64).view(np.uint8)[:count]
