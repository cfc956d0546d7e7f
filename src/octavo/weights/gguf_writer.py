"""GGUF, written: metadata and tensors to a file that octavo, llama.cpp and others read.

The layout is drawn at the top of ``gguf_file.py``; this writes version 3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.weights.dequantise import Encoding, encoded_bytes
from octavo.weights.gguf_file import DEFAULT_ALIGNMENT, MAGIC, SUPPORTED_TYPES

TYPE_NUMBERS: dict[str, int] = {encoding: number for number, encoding in SUPPORTED_TYPES.items()}
_STRING, _ARRAY = 8, 9
_STRUCTS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}


class Typed:
    """A metadata value whose GGUF type is given by its number instead of being chosen from the Python type."""

    def __init__(self, kind: int, value: object) -> None:
        self.kind, self.value = kind, value


def pack_string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def _kind_of(value: object) -> int:
    if isinstance(value, bool):
        return 7
    if isinstance(value, int):
        return 4 if 0 <= value < 1 << 32 else 10 if value >= 0 else 5
    if isinstance(value, float):
        return 6
    return _STRING if isinstance(value, str | bytes) else _ARRAY


def pack_value(value: object) -> tuple[int, bytes]:
    """(type number, bytes): whole numbers as u32 where they fit, others as f32, arrays of whole numbers as i32.

    An array takes the type of its first element; an empty one is of strings.
    """
    if isinstance(value, Typed):
        return value.kind, _pack_as(value.kind, value.value)
    kind = _kind_of(value)
    return kind, _pack_as(kind, value)


def _pack_as(kind: int, value: object) -> bytes:
    if kind == _STRING:
        assert isinstance(value, str | bytes)
        return pack_string(value)
    if kind != _ARRAY:
        return struct.pack(_STRUCTS[kind], value)
    assert isinstance(value, Sequence)
    inner = _STRING
    if value:
        inner = value[0].kind if isinstance(value[0], Typed) else _kind_of(value[0])
        inner = 5 if inner == 4 and not isinstance(value[0], Typed) else inner  # readers want token types as i32
    items = b"".join(_pack_as(inner, item.value if isinstance(item, Typed) else item) for item in value)
    return struct.pack("<IQ", inner, len(value)) + items


def pack_key(key: str | bytes, value: object) -> bytes:
    kind, data = pack_value(value)
    return pack_string(key) + struct.pack("<I", kind) + data


def pack_tensor_info(name: str | bytes, shape: Sequence[int], kind: int, offset: int) -> bytes:
    """``shape`` is row-major, as everywhere but in the file."""
    dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return pack_string(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def pack_header(num_tensors: int, num_keys: int, *, magic: bytes = MAGIC, version: int = 3) -> bytes:
    return magic + struct.pack("<IQQ", version, num_tensors, num_keys)


def write_gguf(
    path: Path,
    metadata: Mapping[str, object],
    infos: Mapping[str, tuple[Encoding, tuple[int, ...]]],
    tensors: Iterable[NDArray[np.uint8]],
) -> None:
    """infos: name -> (encoding, row-major shape); tensors: the bytes of each, in that order, taken one at a time."""
    head, offset = pack_header(len(infos), len(metadata)), 0
    head += b"".join(pack_key(key, value) for key, value in metadata.items())
    sizes = [encoded_bytes(encoding, shape) for encoding, shape in infos.values()]
    for (name, (encoding, shape)), size in zip(infos.items(), sizes, strict=True):
        head += pack_tensor_info(name, shape, TYPE_NUMBERS[encoding], offset)
        offset += size + -size % DEFAULT_ALIGNMENT
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % DEFAULT_ALIGNMENT))
        for name, data, size in zip(infos, tensors, sizes, strict=True):
            assert data.size == size, name
            file.write(data.data)
            file.write(bytes(-size % DEFAULT_ALIGNMENT))
