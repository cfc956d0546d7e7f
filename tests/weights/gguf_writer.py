"""A small GGUF writer for tests: hand-made files, and random two-layer llama models that load, tokenise and chat.

    from weights.gguf_writer import random_llama

    weights = random_llama(tmp_path / "tiny.gguf", encoding="Q4_1", seed=1)     # a file, and what is in it
    weights["layers.0.q.weight"]                                                # [64, 64] float32, rotate-half rows

Encodings are written out here once more, from the format's description alone; the container is octavo's own writer,
which tests/weights/test_gguf_writer.py holds against the ``gguf`` package.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from octavo.model.dummy import random_matrix
from octavo.weights.dequantise import dequantise
from octavo.weights.gguf_writer import (
    Typed,
    pack_header,
    pack_key,
    pack_string,
    pack_tensor_info,
    pack_value,
)

__all__ = ["Typed", "pack_header", "pack_key", "pack_string", "pack_tensor_info", "pack_value"]

# fmt: off
TYPE_NUMBERS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
    "Q5_K": 13, "Q6_K": 14, "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ1_S": 19, "IQ4_NL": 20, "IQ3_S": 21,
    "IQ2_S": 22, "IQ4_XS": 23, "IQ1_M": 29, "BF16": 30, "TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39,
}
# fmt: on
PLAIN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")  # what ``encode`` writes
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2 of random_llama's vocabulary


def write_gguf(
    path: Path,
    metadata: Mapping[str, object],
    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]],
    *,
    version: int = 3,
) -> None:
    """tensors: name -> (encoding, row-major shape, bytes)."""
    given = metadata.get("general.alignment", 32)
    alignment = given if isinstance(given, int) else 32
    infos, blob = [], b""
    for name, (encoding, shape, data) in tensors.items():
        infos.append(pack_tensor_info(name, shape, TYPE_NUMBERS[encoding], len(blob)))
        blob += data + b"\0" * (-len(data) % alignment)
    head = pack_header(len(tensors), len(metadata), version=version)
    head += b"".join(pack_key(key, value) for key, value in metadata.items()) + b"".join(infos)
    path.write_bytes(head + b"\0" * (-len(head) % alignment) + blob)


def encode(values: np.ndarray, encoding: str) -> bytes:
    """float32 [..., K] -> the bytes of an encoding, rounded the plain way. K is a multiple of 32 if it is quantised."""
    values = np.ascontiguousarray(values, np.float32)
    if encoding == "F32":
        return values.astype("<f4").tobytes()
    if encoding == "F16":
        return values.astype("<f2").tobytes()
    if encoding == "BF16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()  # to nearest, ties to even
    return b"".join(_encode_group(group, encoding) for group in values.reshape(-1, 32))


def _encode_group(group: np.ndarray, encoding: str) -> bytes:
    peak = max(float(np.abs(group).max()), 1e-6)
    if encoding == "Q8_0":
        d = np.float16(peak / 127)
        return d.tobytes() + np.clip(np.rint(group / np.float32(d)), -128, 127).astype(np.int8).tobytes()
    if encoding == "Q4_0":
        d, minimum = np.float16(peak / 7), b""
        q = np.rint(group / np.float32(d)) + 8
    else:
        m = np.float16(group.min())
        d, minimum = np.float16(max(float(np.ptp(group)), 1e-6) / 15), m.tobytes()
        q = np.rint((group - np.float32(m)) / np.float32(d))
    nibbles = np.clip(q, 0, 15).astype(np.uint8)
    return d.tobytes() + minimum + (nibbles[:16] | nibbles[16:] << 4).tobytes()


def decode_scalar(data: bytes, encoding: str) -> list[float]:
    """What ``encode`` wrote, one number at a time: exact values (float64 holds every product), for comparisons."""
    if encoding == "F32":
        return list(struct.unpack(f"<{len(data) // 4}f", data))
    if encoding == "F16":
        return list(struct.unpack(f"<{len(data) // 2}e", data))
    if encoding == "BF16":
        halves = struct.unpack(f"<{len(data) // 2}H", data)
        return [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]
    size = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[encoding]
    out: list[float] = []
    for start in range(0, len(data), size):
        group = data[start : start + size]
        (d,) = struct.unpack_from("<e", group)
        if encoding == "Q8_0":
            out += [d * q for q in struct.unpack_from("<32b", group, 2)]
            continue
        (m,) = struct.unpack_from("<e", group, 2) if encoding == "Q4_1" else (-8 * d,)
        packed = group[-16:]
        out += [d * (byte & 15) + m for byte in packed] + [d * (byte >> 4) + m for byte in packed]
    return out


def byte_alphabet() -> list[str]:
    """The 256 printable characters that stand for bytes in GPT-2's byte-level BPE, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def llama_metadata(
    *,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    head_dim: int | None = None,
    context: int = 256,
    rope_theta: float = 10_000.0,
) -> dict[str, object]:
    """The keys without which a llama file is none."""
    keys: dict[str, object] = {
        "general.architecture": "llama",
        "general.name": "random llama",
        "llama.block_count": num_layers,
        "llama.context_length": context,
        "llama.embedding_length": hidden_size,
        "llama.feed_forward_length": intermediate_size,
        "llama.attention.head_count": num_heads,
        "llama.attention.head_count_kv": num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": rope_theta,
        "llama.rope.dimension_count": head_dim or hidden_size // num_heads,
    }
    if head_dim is not None:
        keys["llama.attention.key_length"] = keys["llama.attention.value_length"] = head_dim
    return keys


def tokenizer_metadata(vocab_size: int) -> dict[str, object]:
    """Byte-level BPE: three special tokens, 256 bytes, two merged words, and unused tokens up to ``vocab_size``."""
    words = ["Ġt", "Ġth"]
    tokens = SPECIAL_TOKENS + byte_alphabet() + words
    kinds = [3] * len(SPECIAL_TOKENS) + [1] * (len(tokens) - len(SPECIAL_TOKENS))
    unused = [f"<unused{i}>" for i in range(vocab_size - len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens + unused,
        "tokenizer.ggml.token_type": [Typed(5, kind) for kind in kinds + [5] * len(unused)],
        "tokenizer.ggml.merges": ["Ġ t", "Ġt h"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


#: Words of ``sentencepiece_metadata``, from id 259 on: behind <unk>, <s>, </s> and the 256 bytes.
SENTENCEPIECE_PIECES = ("▁", "a", "b", "c", "l", "o", "▁a", "ab", "bc", "abc", "aa", "aaa", "▁ab", "lo", "▁▁")


def sentencepiece_metadata(vocab_size: int) -> dict[str, object]:
    """SentencePiece with byte fallback: writes BOS and a space before a text. Unused tokens up to ``vocab_size``."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    unused = [f"<unused{i}>" for i in range(vocab_size - 259 - len(SENTENCEPIECE_PIECES))]
    scores = [0.0] * 259 + [-1000.0] * 6 + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -2.0, -8.0, -9.0]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(SENTENCEPIECE_PIECES), *[5] * len(unused)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *bytes_, *SENTENCEPIECE_PIECES, *unused],
        "tokenizer.ggml.scores": scores + [-10000.0] * len(unused),
        "tokenizer.ggml.token_type": [Typed(5, kind) for kind in kinds],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rotate-half rows [heads * head_dim, ...] -> llama GGUF order: rows j and j + half become neighbours."""
    head_dim = len(rows) // num_heads
    out = np.empty_like(rows)
    for head in range(num_heads):
        for j in range(head_dim // 2):
            out[head * head_dim + 2 * j] = rows[head * head_dim + j]
            out[head * head_dim + 2 * j + 1] = rows[head * head_dim + j + head_dim // 2]
    return out


def random_llama(
    path: Path,
    *,
    encoding: str = "F32",
    seed: int = 0,
    num_layers: int = 2,
    hidden_size: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate_size: int = 96,
    vocab_size: int = 288,
    tied: bool = True,
    biases: bool = False,
    with_tokenizer: bool = True,
    extra_metadata: Mapping[str, object] | None = None,
) -> dict[str, np.ndarray]:
    """Write a random model and return its weights by canonical name, float32, exactly as the file holds them.

    Matrices are stored in ``encoding``, norms and biases as F32. All widths must be multiples of its block. Encodings
    that ``encode`` does not know get random blocks, which ``dequantise`` reads.
    """
    rng = np.random.default_rng(seed)
    head_dim = hidden_size // num_heads
    shapes: dict[str, tuple[str, tuple[int, ...], int]] = {  # file name -> canonical name, shape, heads to interleave
        "token_embd.weight": ("embedding.weight", (vocab_size, hidden_size), 0),
        "output_norm.weight": ("final_norm.weight", (hidden_size,), 0),
    }
    if not tied:
        shapes["output.weight"] = ("head.weight", (vocab_size, hidden_size), 0)
    linears = {
        "attn_q": ("q", num_heads * head_dim, hidden_size, num_heads),
        "attn_k": ("k", num_kv_heads * head_dim, hidden_size, num_kv_heads),
        "attn_v": ("v", num_kv_heads * head_dim, hidden_size, 0),
        "attn_output": ("o", hidden_size, num_heads * head_dim, 0),
        "ffn_gate": ("gate", intermediate_size, hidden_size, 0),
        "ffn_up": ("up", intermediate_size, hidden_size, 0),
        "ffn_down": ("down", hidden_size, intermediate_size, 0),
    }
    for i in range(num_layers):
        shapes[f"blk.{i}.attn_norm.weight"] = (f"layers.{i}.attention_norm.weight", (hidden_size,), 0)
        shapes[f"blk.{i}.ffn_norm.weight"] = (f"layers.{i}.mlp_norm.weight", (hidden_size,), 0)
        for file_name, (name, rows, columns, heads) in linears.items():
            shapes[f"blk.{i}.{file_name}.weight"] = (f"layers.{i}.{name}.weight", (rows, columns), heads)
            if biases and name in "qkvo":
                shapes[f"blk.{i}.{file_name}.bias"] = (f"layers.{i}.{name}.bias", (rows,), heads)
    tensors, weights = {}, {}
    for file_name, (name, shape, heads) in shapes.items():
        norm = "norm" in name
        values = rng.standard_normal(shape, np.float32) * (0.1 if norm or len(shape) == 1 else 0.6 / shape[1] ** 0.5)
        values = values + np.float32(norm)
        stored = encoding if len(shape) > 1 else "F32"
        if stored not in PLAIN:
            blocks = random_matrix(rng, shape, stored)
            weights[name] = dequantise(blocks, stored, shape)
            rows = blocks.reshape(shape[0], -1)
            tensors[file_name] = (stored, shape, (interleave(rows, heads) if heads else rows).tobytes())
            continue
        exact = np.array(decode_scalar(encode(values, stored), stored), np.float32).reshape(shape)
        weights[name] = exact
        # encoding works row by row, so rows may be put in the file's order before it
        tensors[file_name] = (stored, shape, encode(interleave(values, heads) if heads else values, stored))
    metadata = llama_metadata(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=intermediate_size,
    )
    if with_tokenizer:
        metadata |= tokenizer_metadata(vocab_size)
    write_gguf(path, {**metadata, **(extra_metadata or {})}, tensors)
    return weights
