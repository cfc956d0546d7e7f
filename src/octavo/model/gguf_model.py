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
from octavo.model.gguf_keys import ROPE_FACTORS, ROPE_TENSORS, GGUFKeys, shape_keys
from octavo.model.registry import ARCHITECTURES, Architecture, find_architecture, known_architectures
from octavo.model.tensor_names import part_of
from octavo.model.tensor_pieces import Piece, is_interleaved, pieces_of, rotate_half_order
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
            self._pieces: dict[str, Piece] = {}
            self._file_names = self._canonical_names()
        except BaseException:
            self.file.close()
            raise
        self.fingerprint = self.file.fingerprint

    def names(self) -> Iterable[str]:
        return self._file_names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._pieces[name].shape_of(self._entry(name).shape)

    def encoding(self, name: str) -> Encoding:
        return self._entry(name).encoding

    def tensor(self, name: str) -> WeightTensor:
        tensor = self._entry(name)
        data = self._pieces[name].data_of(self.file.data(tensor.name), tensor.shape[0])
        return WeightTensor(name=name, shape=self.shape(name), encoding=tensor.encoding, data=data)

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
            if file_name in ROPE_TENSORS:
                continue
            name, shape = self._architecture.names.from_gguf(file_name), self.file.tensors[file_name].shape
            for piece in pieces_of(self._architecture, self.config, name, shape, "gguf"):
                if piece.name in names:
                    both = f"tensors {names[piece.name]!r} and {file_name!r} are both {plain(piece.name, 100)!r}"
                    raise ModelFileError(f"{self.file.path}: {both}")
                names[piece.name] = file_name
                self._pieces[piece.name] = piece
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


def _as_in_file(architecture: Architecture, tensor: WeightTensor, config: ModelConfig) -> NDArray[np.uint8]:
    if not tensor.name.startswith("layers.") or not is_interleaved(architecture, part_of(tensor.name), "gguf"):
        return tensor.data
    return _reordered(tensor.data, tensor.shape[0], np.argsort(rotate_half_order(config)))


def _reordered(data: NDArray[np.uint8], num_rows: int, order: NDArray[np.intp]) -> NDArray[np.uint8]:
    """Whole rows [num_rows, bytes] of a matrix, or the numbers of a bias, with each head's rows in another order."""
    return data.reshape(num_rows // len(order), len(order), -1)[:, order].reshape(-1)
