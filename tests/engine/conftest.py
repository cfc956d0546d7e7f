from __future__ import annotations

import pytest

from octavo.text.tokenizer import Tokenizer
from octavo.text.vocabulary import BYTE_LEVEL_ALPHABET


@pytest.fixture(scope="session")
def small_tokenizer() -> Tokenizer:
    """256 bytes, and one merge."""
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": (*BYTE_LEVEL_ALPHABET, "he"),
            "tokenizer.ggml.merges": ("h e",),
        }
    )
