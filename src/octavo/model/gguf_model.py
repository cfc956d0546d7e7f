"""A GGUF file as a model: its shape, and its tensors by canonical name; and a model as a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ModelFileError
from octavo.core.model_config import ModelConfig
from octavo.model.config_values import llama3_frequency_divisors
from octavo.model.gguf_keys import ROPE_FACTORS, GGUFKeys, shape_keys
from octavo.model.registry import ARCHITECTURES, Architecture, find_architecture, known_architectures
from octavo.model.tensor_names import part_of
from octavo.model.weight_source import WeightSource
from octavo.weights.dequantise import Encoding
from octavo.weights.gguf_file import GGUFFile, GGUFTensor
from octavo.weights.gguf_split import open_gguf
from octavo.weights.gguf_writer import write_gguf
from octavo.weights.messages import plain
from octavo.weights.tensor import WeightTensor

#: ``general.file_type``: what most matrices are.
# fmt: off
FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q4_K": 15,
    "Q5_K": 17, "Q6_K": 18, "IQ2_XXS": 19, "IQ2_XS": 20, "IQ3_XXS": 23, "IQ1_S": 24, "IQ4_NL": 25, "IQ3_S": 26,
    "IQ2_S": 28, "IQ4_XS": 30, "IQ1_M": 31, "BF16": 32, "TQ1_0": 36, "TQ2_0": 37,
}
# fmt: on


class GGUFWeights(WeightSource):
    """A GGUF model, in one file or several parts. Tensors are views of the memory map, except those whose rows are put
    in another order.

    file: the ``GGUFFile`` with the metadata, for the tokenizer and the chat template
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.file = open_gguf(path)
        try:
            self.config = read_gguf_config(self.file)
            self._architecture = find_architecture(self.config.architecture)
            self._file_names = self._canonical_names()
        except BaseException:
            self.file.close()
            raise
        self.fingerprint = self.file.fingerprint

    def names(self) -> Iterable[str]:
        return self._file_names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def encoding(self, name: str) -> Encoding:
        return self._entry(name).encoding

    def tensor(self, name: str) -> WeightTensor:
        tensor = self._entry(name)
        data = self.file.data(tensor.name)
        if is_interleaved(self._architecture, name) and tensor.shape[0] % self.config.head_dim == 0:
            data = _reordered(data, tensor.shape[0], rotate_half_order(self.config))
        # else a mis-shaped one stays as it is: check_complete names it
        return WeightTensor(name=name, shape=tensor.shape, encoding=tensor.encoding, data=data)

    def close(self) -> None:
        self.file.close()

    def _entry(self, name: str) -> GGUFTensor:
        if name not in self._file_names:
            raise ModelFileError(f"{self.file.path} has no tensor {name!r}")
        return self.file.tensors[self._file_names[name]]

    def _canonical_names(self) -> dict[str, str]:
        """Canonical name -> name in the file, for every tensor that is a weight."""
        names: dict[str, str] = {}
        for file_name in self.file.tensors:
            if file_name == ROPE_FACTORS:
                continue
            name = self._architecture.names.from_gguf(file_name)
            if name in names:
                raise ModelFileError(
                    f"{self.file.path}: tensors {names[name]!r} and {file_name!r} are both {plain(name, 100)!r}"
                )
            names[name] = file_name
        return names


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """The shape that the metadata describes. Of a file without tensors (a vocabulary) the head counts as untied."""
    keys = GGUFKeys(file)
    if keys.architecture not in ARCHITECTURES:
        keys.general.fail(f"general.architecture is {keys.architecture!r}; supported are {known_architectures()}")
    return find_architecture(keys.architecture).from_gguf(keys)


def write_model(path: Path, source: WeightSource, tokenizer: Mapping[str, object]) -> None:
    """A model as a GGUF file; one tensor in memory at a time.

    tokenizer: ``tokenizer.*`` keys; as many tokens as the embedding has rows

    Raises ``ModelFileError`` for what such a file cannot say.
    """
    config, names = source.config, list(source.names())
    architecture = find_architecture(config.architecture)
    metadata = {**shape_keys(config), **tokenizer}
    metadata["general.file_type"] = FILE_TYPES[source.encoding("embedding.weight")]
    metadata["general.quantization_version"] = 2
    infos: dict[str, tuple[Encoding, tuple[int, ...]]] = {
        architecture.names.to_gguf(name): (source.encoding(name), source.shape(name)) for name in names
    }
    data = (_as_in_file(architecture, source.tensor(name), config) for name in names)
    if config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
        divisors = llama3_frequency_divisors(config.rope_theta, config.rope_dim, config.rope_scaling)
        infos = {ROPE_FACTORS: ("F32", divisors.shape), **infos}
        data = chain([divisors.astype("<f4").view(np.uint8)], data)  # type: ignore[assignment]
    write_gguf(path, metadata, infos, data)


def is_interleaved(architecture: Architecture, name: str) -> bool:
    """Whether the file keeps the two dimensions that RoPE rotates together in neighbouring rows of this tensor.

    The kernels pair j with j + rope_dim / 2 of a head instead of 2j with 2j + 1. Dimensions beyond rope_dim are not
    rotated and stay where they are.
    """
    return name.startswith("layers.") and part_of(name) in architecture.interleaved


def rotate_half_order(config: ModelConfig) -> NDArray[np.intp]:
    """[head_dim]: which row of a head in an interleaved file each row in rotate-half order is."""
    half = config.rope_dim // 2
    order = np.arange(config.head_dim)
    order[: 2 * half] = np.arange(2 * half).reshape(half, 2).T.ravel()
    return order


def _as_in_file(architecture: Architecture, tensor: WeightTensor, config: ModelConfig) -> NDArray[np.uint8]:
    if not is_interleaved(architecture, tensor.name):
        return tensor.data
    return _reordered(tensor.data, tensor.shape[0], np.argsort(rotate_half_order(config)))


def _reordered(data: NDArray[np.uint8], num_rows: int, order: NDArray[np.intp]) -> NDArray[np.uint8]:
    """Whole rows [num_rows, bytes] of a matrix, or the numbers of a bias, with each head's rows in another order."""
    return data.reshape(num_rows // len(order), len(order), -1)[:, order].reshape(-1)
