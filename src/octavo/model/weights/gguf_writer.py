"""GGUF, written: metadata and tensors to a file that octavo, llama.cpp and others read.

The layout is drawn at the top of ``gguf_file.py``; this writes version 3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ModelFileError
from octavo.core.model_config import ModelConfig
from octavo.kernels.reference.dequantise import encoded_bytes
from octavo.kernels.weight_tensor import Encoding
from octavo.model.weights.config_values import llama3_frequency_divisors
from octavo.model.weights.dummy import DummyWeights
from octavo.model.weights.gguf import gguf_name, interleaved
from octavo.model.weights.gguf_file import DEFAULT_ALIGNMENT, MAGIC, SUPPORTED_TYPES

TYPE_NUMBERS: dict[str, int] = {encoding: number for number, encoding in SUPPORTED_TYPES.items()}
_STRING, _ARRAY = 8, 9
_STRUCTS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
#: ``general.file_type``: what most matrices are.
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}


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


def write_llama(path: Path, source: DummyWeights, tokenizer: Mapping[str, object]) -> None:
    """A model of the llama architecture; one tensor in memory at a time.

    tokenizer: ``tokenizer.*`` keys; as many tokens as the embedding has rows

    Raises ``ModelFileError`` for what such a file cannot say.
    """
    config, names = source.config, list(source.names())
    metadata = {**llama_metadata(config), **tokenizer}
    metadata["general.file_type"] = _FILE_TYPES[source.encoding("embedding.weight")]
    metadata["general.quantization_version"] = 2
    infos: dict[str, tuple[Encoding, tuple[int, ...]]] = {
        gguf_name(name): (source.encoding(name), source.shape(name)) for name in names
    }
    data = (interleaved(name, source.tensor(name).data, config) for name in names)
    if config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
        divisors = llama3_frequency_divisors(config.rope_theta, config.rope_dim, config.rope_scaling)
        infos = {"rope_freqs.weight": ("F32", divisors.shape), **infos}
        write_gguf(path, metadata, infos, chain([divisors.astype("<f4").view(np.uint8)], data))
    else:
        write_gguf(path, metadata, infos, data)


def llama_metadata(config: ModelConfig) -> dict[str, object]:
    """The keys that describe the shape. Raises ``ModelFileError`` for what a llama file cannot say."""
    if config.architecture != "llama" or config.hidden_act != "silu" or config.sliding_window is not None:
        raise ModelFileError(f"{config.name} is not a plain llama model; only those are written as GGUF")
    if config.attention_soft_cap is not None or config.logits_soft_cap is not None:
        raise ModelFileError(f"{config.name} caps its scores, which a llama file cannot say")
    keys: dict[str, object] = {
        "general.architecture": "llama",
        "general.name": config.name,
        "llama.block_count": config.num_layers,
        "llama.context_length": config.max_position,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.vocab_size": config.vocab_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.dimension_count": config.rope_dim,
        "llama.rope.freq_base": config.rope_theta,
    }
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        keys |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": config.rope_scaling.factor}
    return keys
