"""A vocabulary for models without one: every byte, two marks, and for each further id a text that names it."""

from __future__ import annotations

from octavo.core.errors import ModelFileError
from octavo.text.vocabulary import BYTE_LEVEL_ALPHABET, TokenKind

START, END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}" + START + "{{ m['role'] }}\n{{ m['content'] }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}" + START + "assistant\n{% endif %}"
)
_SPACE = BYTE_LEVEL_ALPHABET[ord(" ")]
_TAKEN = len(BYTE_LEVEL_ALPHABET) + 3


def dummy_vocabulary(vocab_size: int) -> dict[str, object]:
    """``tokenizer.*`` keys, as in a GGUF file, of ``vocab_size`` tokens.

    Ids 0 to 255 are the bytes; ``encode`` makes only those and " t". A random model's other ids read as " 300",
    " 301", ..., so that a stream shows every token. Raises ``ModelFileError`` below 259 tokens.
    """
    if vocab_size < _TAKEN:
        raise ModelFileError(f"a vocabulary of {vocab_size} tokens has no room for the {_TAKEN} that every text needs")
    texts = [*BYTE_LEVEL_ALPHABET, START, END, _SPACE + "t"]  # llama.cpp wants at least one merge
    texts += [f"{_SPACE}{token_id}" for token_id in range(_TAKEN, vocab_size)]
    kinds = [int(TokenKind.NORMAL)] * vocab_size
    start, end = len(BYTE_LEVEL_ALPHABET), len(BYTE_LEVEL_ALPHABET) + 1
    kinds[start] = kinds[end] = int(TokenKind.CONTROL)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tuple(texts),
        "tokenizer.ggml.token_type": tuple(kinds),
        "tokenizer.ggml.merges": (f"{_SPACE} t",),
        "tokenizer.ggml.bos_token_id": start,
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
