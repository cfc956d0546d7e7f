"""A copy of a GGUF model with its matrices in bfloat16, to compare weight formats on the same model."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.weights.dequantise import Encoding, dequantise
from octavo.weights.gguf_file import DEFAULT_ALIGNMENT, SUPPORTED_TYPES, GGUFFile

TYPE_NUMBERS = {encoding: number for number, encoding in SUPPORTED_TYPES.items()}
Entry = tuple[str, tuple[int, ...], Encoding, int]  # name, row-major shape, encoding, offset into the data section


def write_bf16_copy(source: Path, target: Path) -> None:
    """Write ``source`` to ``target`` with every matrix as BF16, from its dequantised values; vectors stay as they are.

    All metadata, the tokenizer among them, are copied byte for byte: only the table of tensors and the data behind it
    are written anew. Raises ModelFileError for a source that is not a GGUF file.
    """
    file = GGUFFile(source)
    try:
        tensors = list(file.tensors.values())  # in the file's order
        alignment = file.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        assert isinstance(alignment, int), "GGUFFile has checked it"
        data_start = min(tensor.start for tensor in tensors)
        with source.open("rb") as stream:
            header = stream.read(data_start)
        old_table = _table([(t.name, t.shape, t.encoding, t.start - data_start) for t in tensors])

        entries: list[Entry] = []
        offset = 0
        for tensor in tensors:
            encoding: Encoding = "BF16" if len(tensor.shape) > 1 else tensor.encoding
            entries.append((tensor.name, tensor.shape, encoding, offset))
            size = 2 * int(np.prod(tensor.shape)) if encoding == "BF16" else tensor.num_bytes
            offset += size + -size % alignment

        head = header[: header.index(old_table)] + _table(entries)  # the old table is a string that occurs once
        with target.open("wb") as stream:
            stream.write(head + bytes(-len(head) % alignment))
            for tensor, (_, _, encoding, _) in zip(tensors, entries, strict=True):
                data = file.data(tensor.name)
                if encoding == "BF16":
                    data = to_bf16(dequantise(data, tensor.encoding, tensor.shape)).view(np.uint8).reshape(-1)
                stream.write(data.tobytes() + bytes(-data.size % alignment))
    finally:
        file.close()


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round finite float32 to bfloat16, to nearest, ties to even; the result holds the upper halves."""
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")


def _table(entries: list[Entry]) -> bytes:
    """GGUF's table of tensors: string name | u32 dimensions | u64 each, fastest first | u32 encoding | u64 offset."""
    rows = []
    for name, shape, encoding, offset in entries:
        text = name.encode()
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        rows.append(struct.pack("<Q", len(text)) + text + dimensions)
        rows.append(struct.pack("<IQ", TYPE_NUMBERS[encoding], offset))
    return b"".join(rows)
