"""Small vocabularies made by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.text.tokenizer import Tokenizer
from octavo.text.vocabulary import BYTE_LEVEL_ALPHABET

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "[INST]", "<|user|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "i m", "< |", "| >", "Ġ Ġ", "â Ĥ", "âĤ ¬")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def byte_level_metadata() -> Callable[..., dict[str, Any]]:
    """GGUF metadata of a byte-level vocabulary: five control tokens, 256 bytes, a few merges, two user-defined."""

    def make(**changes: Any) -> dict[str, Any]:
        merged = [merge.replace(" ", "") for merge in MERGES]
        tokens = [*CONTROL, *BYTE_LEVEL_ALPHABET, *merged, "<think>", "<|mark|>"]
        kinds = [3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL) - 2) + [4, 4]
        metadata = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tuple(tokens),
            "tokenizer.ggml.token_type": tuple(kinds),
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.chat_template": CHATML,
        }
        metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        return {key: value for key, value in metadata.items() if value is not None}

    return make


@pytest.fixture(scope="session")
def sentencepiece_metadata() -> Callable[..., dict[str, Any]]:
    """GGUF metadata of a SentencePiece vocabulary with byte fallback."""

    def make(**changes: Any) -> dict[str, Any]:
        pieces = ["▁", "a", "b", "c", "l", "o", "▁a", "ab", "bc", "abc", "aa", "aaa", "▁ab", "lo", "▁▁"]
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
        scores = [0.0] * 259 + [-1000.0] * 6 + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -2.0, -8.0, -9.0]
        metadata = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tuple(tokens),
            "tokenizer.ggml.scores": tuple(scores),
            "tokenizer.ggml.token_type": (2, 3, 3, *(6,) * 256, *(1,) * len(pieces)),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        }
        metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        return {key: value for key, value in metadata.items() if value is not None}

    return make


@pytest.fixture(scope="session")
def small_tokenizer(byte_level_metadata: Callable[..., dict[str, Any]]) -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_metadata())


@pytest.fixture(scope="session")
def real_tokenizer(model_path: Path) -> Tokenizer:
    """The default model's own."""
    from octavo.weights.gguf_file import GGUFFile

    file = GGUFFile(model_path)
    try:
        return Tokenizer.from_gguf(file.metadata)
    finally:
        file.close()
