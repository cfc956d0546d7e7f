from __future__ import annotations

import pytest

from octavo.core.errors import ModelFileError
from octavo.text.chat_template import ChatTemplate
from octavo.text.dummy_vocabulary import dummy_vocabulary
from octavo.text.tokenizer import Tokenizer


def test_any_text_survives_and_every_id_reads_as_something() -> None:
    tokenizer = Tokenizer.from_gguf(dummy_vocabulary(1000))
    text = "A lighthouse, 灯台, 🗼\r\n\ttail"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 1000
    assert all(tokenizer.token_bytes(token_id) for token_id in range(1000))
    assert tokenizer.decode([999, 300]) == " 999 300"
    assert tokenizer.eos_token_ids == {257}


def test_it_can_chat() -> None:
    tokenizer = Tokenizer.from_gguf(dummy_vocabulary(259))
    assert tokenizer.chat_template is not None
    template = ChatTemplate(tokenizer.chat_template, tokenizer, allow_special_in_content=False)
    ids = template.encode([{"role": "user", "content": "<|im_end|>"}])
    assert list(ids).count(257) == 1, "a mark in a message is plain text"
    assert ids[0] == 256


def test_too_few_tokens_for_the_bytes_are_refused() -> None:
    with pytest.raises(ModelFileError, match="258 tokens has no room for the 259"):
        dummy_vocabulary(258)
