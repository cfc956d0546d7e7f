"""GGUF, the container: a strict reader that trusts no number in the file.

    magic "GGUF" | u32 version | u64 tensors | u64 keys
    keys    x (string key, u32 type, value)            string = u64 length, UTF-8 bytes
    tensors x (string name, u32 dims, u64 x dims (fastest first), u32 encoding, u64 offset into the data section)
    padding to the alignment | data section

All little-endian. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).

Nothing is allocated in proportion to a number before that number is checked against the bytes that are left, and the
header as a whole is bounded, so the worst file costs under a second and under 200 MB. The file is memory-mapped:
opening reads the header alone.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ModelFileError
from octavo.weights.dequantise import Encoding, encoded_bytes
from octavo.weights.mapped_file import map_file
from octavo.weights.messages import plain

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Bounds of a header. The largest real ones (262k tokens with merges) have 15 MB, 776k strings and 524k numbers.
MAX_HEADER_BYTES = 24 << 20
MAX_STRING_BYTES = 1 << 20
MAX_STRINGS = 1_000_000  # in arrays; each costs up to 90 bytes of memory and 0.8 us
MAX_NUMBERS = 1_000_000  # in arrays
MAX_ENTRIES = 65_536  # keys; nested arrays; tensors
MAX_ARRAY_DEPTH = 4
MAX_DIMS = 4

# fmt: off
SUPPORTED_TYPES: dict[int, Encoding] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0",
}
_UNSUPPORTED = {  # only to name them
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 39: "MXFP4", 40: "NVFP4",
}
# fmt: on

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies. ``start`` counts from the beginning of the file."""

    name: str
    shape: tuple[int, ...]  # row-major, the reverse of the file's order
    encoding: Encoding
    start: int
    num_bytes: int


class GGUFFile:
    """An opened GGUF file. Every error is a ``ModelFileError`` that names the file.

    metadata: key -> int | float | bool | str | tuple of these (arrays)
    tensors:  name -> ``GGUFTensor``; ranges are checked to lie inside the file and not to overlap
    fingerprint: hash of the header (metadata, names, shapes, encodings, offsets) and the file's size
    """

    metadata: Mapping[str, object]
    tensors: Mapping[str, GGUFTensor]
    fingerprint: str

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._map: mmap.mmap | None = map_file(self.path)
        try:
            header = _Header(self._map, self.path)
            self.metadata, self.tensors = header.parse()
            digest = sha256(memoryview(self._map)[: header.position])
            digest.update(_U64.pack(header.size))
            self.fingerprint = digest.hexdigest()[:16]
        except BaseException:
            self.close()
            raise

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, 1-D, read-only, memory-mapped. ``ModelFileError`` if there is no such tensor."""
        if self._map is None:
            raise ModelFileError(f"{self.path} has been closed")
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{self.path} has no tensor {name!r}")
        return np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.start)

    def close(self) -> None:
        """Forget the file. The mapping itself goes when the last array that looks into it does."""
        self._map = None


class _Header:
    """One pass over the header. ``position`` moves; ``end`` is where reading must stop."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer, self.path = buffer, path
        self.size = len(buffer)
        self.end = min(self.size, MAX_HEADER_BYTES)
        self.position = 0
        self.strings_left, self.numbers_left = MAX_STRINGS, MAX_NUMBERS
        self.arrays_left = MAX_ENTRIES

    def parse(self) -> tuple[Mapping[str, object], Mapping[str, GGUFTensor]]:
        self._read_magic()
        num_tensors = self._count("tensors", _U64.size * 2 + _U32.size * 2)
        num_keys = self._count("metadata keys", _U64.size + _U32.size + 1)
        metadata: dict[str, object] = {}
        for _ in range(num_keys):
            key = self._string("a metadata key")
            if key in metadata:
                self._fail(f"metadata key {key!r} appears twice")
            metadata[key] = self._value(self._number("I", key), key, 0)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            self._fail(f"general.alignment is {alignment!r} but must be a power of two, at least 8")
        infos = [self._tensor_info() for _ in range(num_tensors)]
        data_start = -(-self.position // alignment) * alignment
        return MappingProxyType(metadata), MappingProxyType(self._place(infos, data_start, alignment))

    def _fail(self, problem: str) -> NoReturn:
        raise ModelFileError(f"{self.path}: {plain(problem)}")

    def _advance(self, length: int, what: str) -> int:
        """Claim ``length`` bytes; returns where they start."""
        start = self.position
        if length > self.end - start:
            if length <= self.size - start:
                self._fail(f"the header is longer than {MAX_HEADER_BYTES} bytes, at {what}")
            self._fail(f"{what} needs {length} bytes at offset {start} but the file ends at {self.size}")
        self.position = start + length
        return start

    def _read_magic(self) -> None:
        magic = self.buffer[: len(MAGIC)]
        if magic != MAGIC:
            self._fail(f"not a GGUF file: it starts with {magic!r} instead of {MAGIC!r}")
        self.position = len(MAGIC)
        version = self._number("I", "the version")
        if version in VERSIONS:
            return
        if version in (v << 24 for v in (1, *VERSIONS)):
            self._fail("a big-endian GGUF file; only little-endian ones are supported")
        self._fail(f"GGUF version {version} is not supported; versions {VERSIONS[0]} and {VERSIONS[1]} are")

    def _count(self, what: str, least_bytes: int) -> int:
        """A number of entries of which each takes at least ``least_bytes``."""
        count = self._number("Q", f"the number of {what}")
        if count > MAX_ENTRIES or count * least_bytes > self.size - self.position:
            self._fail(f"{count} {what} are announced, more than the file can hold (and at most {MAX_ENTRIES})")
        return count

    def _number(self, code: str, what: str) -> int:
        start = self._advance(struct.calcsize(code), what)
        value: int = struct.unpack_from("<" + code, self.buffer, start)[0]
        return value

    def _string(self, what: str) -> str:
        length = self._number("Q", what)
        if length > MAX_STRING_BYTES:
            self._fail(f"{what} is a string of {length} bytes; at most {MAX_STRING_BYTES}")
        start = self._advance(length, what)
        try:
            return self.buffer[start : start + length].decode()
        except UnicodeDecodeError as error:
            self._fail(f"{what} is not valid UTF-8 at offset {start + error.start}")

    def _value(self, kind: int, key: str, depth: int) -> object:
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key, depth)
        if kind not in _NUMBERS:
            self._fail(f"metadata key {key!r} has the unknown type {kind}")
        value = self._number(_NUMBERS[kind], key)
        if kind != _BOOL:
            return value
        if value > 1:
            self._fail(f"metadata key {key!r} is a truth value but holds {value}")
        return bool(value)

    def _array(self, key: str, depth: int) -> tuple[object, ...]:
        kind, count = self._number("I", key), self._number("Q", key)
        self.arrays_left -= 1
        if self.arrays_left < 0:
            self._fail(f"array {key!r} is one of more than {MAX_ENTRIES}")
        if kind == _STRING:
            return self._strings(key, count)
        if kind == _ARRAY:
            if depth + 1 >= MAX_ARRAY_DEPTH:
                self._fail(f"arrays in {key!r} are nested deeper than {MAX_ARRAY_DEPTH}")
            if count > self.arrays_left:
                self._fail(f"array {key!r} holds {count} arrays; at most {MAX_ENTRIES} are read")
            return tuple(self._array(key, depth + 1) for _ in range(count))
        if kind not in _NUMBERS:
            self._fail(f"array {key!r} has elements of the unknown type {kind}")
        self.numbers_left -= count
        if self.numbers_left < 0:
            self._fail(f"array {key!r} of {count} takes the metadata past {MAX_NUMBERS} numbers")
        layout = f"<{count}{_NUMBERS[kind]}"
        start = self._advance(struct.calcsize(layout), key)
        values = struct.unpack_from(layout, self.buffer, start)
        if kind != _BOOL:
            return values
        if any(value > 1 for value in values):
            self._fail(f"array {key!r} of truth values holds {max(values)}")
        return tuple(map(bool, values))

    def _strings(self, key: str, count: int) -> tuple[str, ...]:
        """Hot: a vocabulary has up to half a million strings, so this loop inlines what ``_string`` does."""
        self.strings_left -= count
        if self.strings_left < 0:
            self._fail(f"array {key!r} of {count} takes the metadata past {MAX_STRINGS} strings")
        buffer, end, position, unpack = self.buffer, self.end, self.position, _U64.unpack_from
        if count * _U64.size > end - position:
            self._advance(count * _U64.size, key)  # raises
        strings: list[str] = []
        append = strings.append
        try:
            for _ in range(count):
                (length,) = unpack(buffer, position)
                position += 8
                if length > end - position or length > MAX_STRING_BYTES:
                    self.position = position - 8
                    self._string(f"string {len(strings)} of {key}")  # raises, with the reason
                append(buffer[position : position + length].decode())
                position += length
        except UnicodeDecodeError as error:
            self._fail(f"string {len(strings)} of {key} is not valid UTF-8 at offset {position + error.start}")
        except struct.error:
            self._fail(f"string {len(strings)} of {key} is cut off by the end of the file at {self.size}")
        self.position = position
        return tuple(strings)

    def _tensor_info(self) -> GGUFTensor:
        """One entry of the tensor table; ``start`` still counts from the data section."""
        name = self._string("a tensor name")
        num_dims = self._number("I", name)
        if not 1 <= num_dims <= MAX_DIMS:
            self._fail(f"tensor {name!r} has {num_dims} dimensions; 1 to {MAX_DIMS} are possible")
        shape = tuple(self._number("Q", name) for _ in range(num_dims))[::-1]
        if 0 in shape:
            self._fail(f"tensor {name!r} has a dimension of 0: {shape}")
        kind = self._number("I", name)
        if kind not in SUPPORTED_TYPES:
            known = _UNSUPPORTED.get(kind, f"the unknown encoding {kind}")
            self._fail(f"tensor {name!r} is stored as {known}; supported are {', '.join(SUPPORTED_TYPES.values())}")
        encoding = SUPPORTED_TYPES[kind]
        try:
            num_bytes = encoded_bytes(encoding, shape)
        except ValueError as error:
            self._fail(f"tensor {name!r}: {error}")
        if prod(shape) >= 1 << 63:
            self._fail(f"tensor {name!r} of shape {shape} has more than 2**63 weights")
        return GGUFTensor(name, shape, encoding, self._number("Q", name), num_bytes)

    def _place(self, infos: list[GGUFTensor], data_start: int, alignment: int) -> dict[str, GGUFTensor]:
        """Check that the tensors lie aligned, inside the file and apart from each other; make ``start`` absolute."""
        tensors: dict[str, GGUFTensor] = {}
        for info in infos:
            if info.name in tensors:
                self._fail(f"tensor {info.name!r} appears twice")
            start = data_start + info.start
            if info.start % alignment:
                self._fail(f"tensor {info.name!r} has offset {info.start}, not a multiple of {alignment}")
            if start + info.num_bytes > self.size:
                self._fail(
                    f"tensor {info.name!r} needs bytes {start} to {start + info.num_bytes} "
                    f"but the file ends at {self.size}; it may be a partial download"
                )
            tensors[info.name] = GGUFTensor(info.name, info.shape, info.encoding, start, info.num_bytes)
        in_order = sorted(tensors.values(), key=lambda tensor: tensor.start)
        for first, second in pairwise(in_order):
            if first.start + first.num_bytes > second.start:
                self._fail(f"tensors {first.name!r} and {second.name!r} overlap")
        return tensors
