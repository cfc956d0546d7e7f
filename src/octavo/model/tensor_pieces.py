"""What of a file's tensor is which tensor of the model: parts of fused matrices, rows in another order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ModelFileError
from octavo.core.model_config import ModelConfig
from octavo.model.registry import Architecture, find_architecture
from octavo.model.tensor_names import part_of

FileFormat = Literal["gguf", "hf"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a tensor in a file. rows None: all of them, as they lie there."""

    name: str  # of the tensor of the model, canonical
    rows: NDArray[np.intp] | slice | None

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Its shape, the file's tensor having ``shape``."""
        if self.rows is None:
            return shape
        count = self.rows.stop - self.rows.start if isinstance(self.rows, slice) else len(self.rows)
        return (count, *shape[1:])

    def data_of(self, data: NDArray[np.uint8], num_rows: int) -> NDArray[np.uint8]:
        """Its bytes, of the file's tensor of ``num_rows`` rows: a view if they lie side by side."""
        return data if self.rows is None else data.reshape(num_rows, -1)[self.rows].reshape(-1)


def pieces_of(
    architecture: Architecture, config: ModelConfig, name: str, shape: tuple[int, ...], file_format: FileFormat
) -> list[Piece]:
    """The pieces of the file's tensor with the canonical name ``name``; the tensor itself for most.

    Raises ``ModelFileError`` for a fused tensor that does not have the rows of its parts. Any other that is mis-shaped
    stays as it is, for ``check_complete`` to name.
    """
    if not name.startswith("layers."):
        return [Piece(name, None)]
    part = part_of(name)
    names = architecture.fused.get(part)
    if names is None:
        return [Piece(name, _rows(architecture, config, part, 0, shape[0], file_format))]
    prefix, kind = name.removesuffix(f"{part}.{name.rpartition('.')[2]}"), name.rpartition(".")[2]
    sizes = {other: _sizes(config)[other] for other in names}
    if sum(sizes.values()) != shape[0]:
        raise ModelFileError(
            f"{config.name}: tensor {name} has {shape[0]} rows but {', '.join(names)} have {sum(sizes.values())}"
        )
    if architecture.fused_by_head and part == "qkv" and file_format == "hf":
        return [Piece(f"{prefix}{other}.{kind}", rows) for other, rows in _by_head(config, names).items()]
    pieces, start = [], 0
    for other, size in sizes.items():
        rows = _rows(architecture, config, other, start, size, file_format)
        pieces.append(Piece(f"{prefix}{other}.{kind}", slice(start, start + size) if rows is None else rows))
        start += size
    return pieces


def rotate_half_order(config: ModelConfig) -> NDArray[np.intp]:
    """[head_dim]: which row of a head in an interleaved file each row in rotate-half order is.

    The kernels pair j with j + rope_dim / 2 of a head instead of 2j with 2j + 1. Dimensions beyond rope_dim are not
    rotated and stay where they are.
    """
    half = config.rope_dim // 2
    order = np.arange(config.head_dim)
    order[: 2 * half] = np.arange(2 * half).reshape(half, 2).T.ravel()
    return order


def is_interleaved(architecture: Architecture, part: str, file_format: FileFormat) -> bool:
    """Whether the file keeps the two dimensions that RoPE rotates together in neighbouring rows of this tensor."""
    return part in (architecture.interleaved if file_format == "gguf" else architecture.interleaved_in_hf)


def _rows(
    architecture: Architecture, config: ModelConfig, part: str, start: int, size: int, file_format: FileFormat
) -> NDArray[np.intp] | None:
    if not is_interleaved(architecture, part, file_format) or size % config.head_dim:
        return None
    return (start + np.arange(0, size, config.head_dim)[:, None] + rotate_half_order(config)).reshape(-1)


@lru_cache(maxsize=1)
def _sizes(config: ModelConfig) -> Mapping[str, int]:
    """Rows of each matrix of a layer; layers are alike."""
    specs = find_architecture(config.architecture).tensors(config)
    return {part_of(name): spec.shape[0] for name, spec in specs.items() if name.startswith("layers.0.")}


def _by_head(config: ModelConfig, names: tuple[str, ...]) -> Mapping[str, NDArray[np.intp]]:
    """Rows of a file that has the parts of the first head, then those of the second, ...: all with as many heads."""
    heads = np.arange(config.num_heads)[:, None] * len(names)
    return {
        name: ((heads + i) * config.head_dim + np.arange(config.head_dim)).reshape(-1) for i, name in enumerate(names)
    }
