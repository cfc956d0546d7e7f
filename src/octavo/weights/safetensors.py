"""safetensors, the container: u64 length | JSON header {name: {dtype, shape, data_offsets}} | data.

Format: https://huggingface.co/docs/safetensors. Read here on a memory map, and as strictly as GGUF: every range lies
inside the file, none overlaps, every size is the one that dtype and shape demand.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, TypeGuard

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ModelFileError
from octavo.weights.dequantise import Encoding, encoded_bytes
from octavo.weights.mapped_file import map_file
from octavo.weights.messages import plain
from octavo.weights.strict_json import MAX_JSON_BYTES, parse_object

_DTYPES: dict[str, Encoding] = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
_LENGTH_BYTES = 8
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """Where one tensor lies. ``start`` counts from the beginning of the file."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    start: int
    num_bytes: int


class SafetensorsFile:
    """An opened safetensors file. Every error is a ``ModelFileError`` that names the file.

    tensors: name -> ``SafetensorsEntry``
    fingerprint: hash of the header and the file's size
    """

    tensors: Mapping[str, SafetensorsEntry]
    fingerprint: str

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = map_file(path)
        size = len(self._map)
        length = int.from_bytes(self._map[:_LENGTH_BYTES], "little")
        if length > size - _LENGTH_BYTES:
            self._fail(f"a header of {length} bytes is announced but the file has {size}; it may be a partial download")
        if length > MAX_JSON_BYTES:
            self._fail(f"the header has {length} bytes; at most {MAX_JSON_BYTES} are read")
        header = self._map[_LENGTH_BYTES : _LENGTH_BYTES + length]
        digest = sha256(header)
        digest.update(size.to_bytes(8, "little"))
        self.fingerprint = digest.hexdigest()[:16]
        entries = parse_object(header, f"{path} (header)")
        entries.pop("__metadata__", None)  # free text
        data_start = _LENGTH_BYTES + length
        self.tensors = MappingProxyType({name: self._entry(name, entries[name], data_start, size) for name in entries})
        in_order = sorted(self.tensors.values(), key=lambda entry: entry.start)
        for first, second in pairwise(in_order):
            if first.start + first.num_bytes > second.start:
                self._fail(f"tensors {first.name!r} and {second.name!r} overlap")

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, 1-D, read-only, memory-mapped. ``ModelFileError`` if there is no such tensor."""
        if self._map is None:
            raise ModelFileError(f"{self.path} has been closed")
        entry = self.tensors.get(name)
        if entry is None:
            raise ModelFileError(f"{self.path} has no tensor {name!r}")
        return np.frombuffer(self._map, np.uint8, entry.num_bytes, entry.start)

    def close(self) -> None:
        """Forget the file. The mapping itself goes when the last array that looks into it does."""
        self._map = None

    def _fail(self, problem: str) -> NoReturn:
        raise ModelFileError(f"{self.path}: {plain(problem)}")

    def _entry(self, name: str, fields: object, data_start: int, size: int) -> SafetensorsEntry:
        if not isinstance(fields, dict):
            self._fail(f"tensor {name!r} is described by a {type(fields).__name__}, not by an object")
        dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            self._fail(f"tensor {name!r} is stored as {str(dtype)[:40]}; supported are {', '.join(_DTYPES)}")
        if not _whole_numbers(shape) or len(shape) > _MAX_DIMS or 0 in shape:
            self._fail(
                f"tensor {name!r} has the shape {str(shape)[:80]}; up to {_MAX_DIMS} positive dimensions are possible"
            )
        if not _whole_numbers(offsets) or len(offsets) != 2:
            self._fail(f"tensor {name!r} has the offsets {str(offsets)[:80]} instead of two whole numbers")
        begin, end = offsets
        encoding = _DTYPES[dtype]
        if prod(shape) >= 1 << 63:
            self._fail(f"tensor {name!r} of shape {shape} has more than 2**63 weights")
        num_bytes = encoded_bytes(encoding, tuple(shape))
        if end - begin != num_bytes:
            self._fail(f"tensor {name!r} of {dtype} {shape} takes {num_bytes} bytes but has offsets {begin} to {end}")
        if data_start + end > size:
            self._fail(f"tensor {name!r} ends at byte {data_start + end} but the file at {size}; a partial download?")
        return SafetensorsEntry(name, tuple(shape), encoding, data_start + begin, num_bytes)


def _whole_numbers(value: object) -> TypeGuard[list[int]]:
    """A list of whole numbers from 0 to 2**64, without truth values, which JSON keeps apart and Python does not."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 64 for item in value)
