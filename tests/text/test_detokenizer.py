"""Text that comes token by token is the text that comes at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import Tokenizer


def stream(tokenizer: Tokenizer, ids: list[int], **options: Any) -> str:
    detokenizer = Detokenizer(tokenizer, **options)
    text = ""
    for token_id in ids:
        text += detokenizer.push(token_id)
        assert detokenizer.num_chars == len(text)
    text += detokenizer.flush()
    assert detokenizer.num_chars == len(text)
    return text


@given(data=st.data(), skip=st.booleans())
def test_any_tokens_stream_to_their_joined_bytes_decoded_at_once(
    small_tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, small_tokenizer.vocab_size - 1)))
    kept = [i for i in ids if not (skip and small_tokenizer.is_control(i))]
    joined = b"".join(map(small_tokenizer.token_bytes, kept))
    assert stream(small_tokenizer, ids, skip_special=skip) == joined.decode("utf-8", "replace")
    assert small_tokenizer.decode(ids, skip_special=skip) == joined.decode("utf-8", "replace")


@given(text=st.text())
def test_well_formed_text_never_shows_a_broken_character(small_tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(small_tokenizer)
    shown = ""
    for token_id in small_tokenizer.encode(text):
        shown += detokenizer.push(token_id)
        assert text.startswith(shown)
    assert shown == text
    assert not detokenizer.pending
    assert detokenizer.flush() == ""


def test_a_character_that_never_completes_becomes_one_replacement_at_the_end(small_tokenizer: Tokenizer) -> None:
    ids = small_tokenizer.encode("a€")
    detokenizer = Detokenizer(small_tokenizer)
    assert not detokenizer.pending
    euro = small_tokenizer.encode("😀")
    assert [detokenizer.push(i) for i in ids] == ["a", "€"]
    assert not detokenizer.pending
    assert [detokenizer.push(i) for i in euro[:-1]] == [""] * (len(euro) - 1)
    assert detokenizer.pending
    assert detokenizer.flush() == "\ufffd"
    assert not detokenizer.pending


def test_control_tokens_between_the_bytes_of_a_character_do_not_break_it(small_tokenizer: Tokenizer) -> None:
    first, *rest = small_tokenizer.encode("😀")
    assert stream(small_tokenizer, [first, 1, *rest, 2]) == "😀"


def test_padding_rows_of_the_embedding_have_no_text(small_tokenizer: Tokenizer) -> None:
    assert stream(small_tokenizer, [small_tokenizer.vocab_size, small_tokenizer.vocab_size + 7]) == ""
    assert small_tokenizer.token_bytes(small_tokenizer.vocab_size) == b""


def test_the_space_that_sentencepiece_adds_goes_from_a_whole_text_and_stays_in_a_continuation(
    sentencepiece_metadata: Callable[..., dict[str, Any]],
) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata())
    ids = tokenizer.encode("ab  lo")
    assert stream(tokenizer, ids) == " ab  lo"
    assert stream(tokenizer, ids, drop_space_prefix=True) == "ab  lo"
    assert stream(tokenizer, tokenizer.encode(" lo"), drop_space_prefix=True) == " lo"
    assert tokenizer.decode(ids) == "ab  lo"
