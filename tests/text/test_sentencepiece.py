"""SentencePiece encoding against its definition written out."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.core.errors import ModelFileError
from octavo.core.steps import finish
from octavo.text import sentencepiece
from octavo.text.sentencepiece import SentencePieceEncoder
from octavo.text.tokenizer import Tokenizer

MakeMetadata = Callable[..., dict[str, Any]]


def merge_by_definition(text: str, scores: dict[str, float]) -> list[str]:
    """Again and again join the neighbours whose joint token scores highest, of equals the leftmost."""
    symbols = list(text)
    while True:
        joins = [
            (-scores[left + right], at) for at, (left, right) in enumerate(pairwise(symbols)) if left + right in scores
        ]
        if not joins:
            return symbols
        at = min(joins)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@given(
    merged=st.dictionaries(st.text("ab▁", min_size=2, max_size=5), st.integers(-4, 0).map(float), max_size=14),
    text=st.text("ab ", max_size=24),
)
@example(merged={"ab": -1.0, "bab": -2.0, "abbab": -3.0}, text="abbab")  # a symbol's neighbour has grown before it does
@example(merged={"ab": -1.0, "aba": -2.0, "ba": -3.0}, text="aba")  # what was to be joined is gone
def test_merging_follows_the_definition_whatever_the_scores(merged: dict[str, float], text: str) -> None:
    scores = {"a": 0.0, "b": 0.0, "▁": 0.0, **merged}
    names = list(scores)
    encoder = SentencePieceEncoder({t: (i, scores[t]) for i, t in enumerate(names)}, (), None, add_space=True)
    expected = merge_by_definition("▁" + text.replace(" ", "▁"), scores)
    for _ in range(2):  # the second time from the cache of words
        assert [names[i] for i in finish(encoder.encode_steps([text]))[0]] == expected


def texts_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_text(i) for i in ids]


def test_a_text_gets_bos_and_a_space_and_characters_without_a_token_become_bytes(
    sentencepiece_metadata: MakeMetadata,
) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata())
    assert texts_of(tokenizer, tokenizer.encode("ab€")) == ["<s>", "▁ab", "<0xE2>", "<0x82>", "<0xAC>"]
    assert tokenizer.decode(tokenizer.encode("ab€")) == "ab€"
    plain = Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False))
    assert texts_of(plain, plain.encode("ab")) == ["ab"]


def test_each_piece_between_special_tokens_gets_its_space(sentencepiece_metadata: MakeMetadata) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata())
    ids = tokenizer.encode("ab</s>ab", parse_special=True)
    assert texts_of(tokenizer, ids) == ["<s>", "▁ab", "</s>", "▁ab"]


def test_the_names_of_control_and_byte_tokens_are_plain_text(sentencepiece_metadata: MakeMetadata) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata())
    text = "</s><unk><0x41>"
    ids = tokenizer.encode(text, add_bos=False)
    assert not any(map(tokenizer.is_control, ids))
    assert tokenizer.decode(ids) == text


def test_any_text_survives_the_round_trip(sentencepiece_metadata: MakeMetadata) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata())

    @given(text=st.text().filter(lambda text: "▁" not in text))  # SentencePiece cannot tell U+2581 from a space
    def check(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == text

    check()


def test_without_byte_tokens_a_character_without_a_token_is_the_unknown_one() -> None:
    encoder = SentencePieceEncoder({"a": (5, 0.0)}, (), 3, add_space=False)
    assert finish(encoder.encode_steps(["aéa"])) == [[5, 3, 5]]


def test_a_long_word_costs_little_more_than_its_length(sentencepiece_metadata: MakeMetadata) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata())
    ids = tokenizer.encode("abc" * 10_000, add_bos=False)
    assert texts_of(tokenizer, ids[:2]) == ["▁ab", "c"]
    assert tokenizer.decode(ids) == "abc" * 10_000


def test_a_word_of_several_stretches_between_yields_merges_by_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentencepiece, "_PER_STEP", 16)
    rng = random.Random(0)
    text = "".join(rng.choice("ab") for _ in range(150))
    scores = {"a": 0.0, "b": 0.0, "ab": -1.0, "bb": -2.0, "abab": -2.5, "abb": -3.0, "aab": -1.5, "bba": -4.0}
    names = list(scores)
    encoder = SentencePieceEncoder({t: (i, scores[t]) for i, t in enumerate(names)}, (), None, add_space=False)
    assert [names[i] for i in finish(encoder.encode_steps([text]))[0]] == merge_by_definition(text, scores)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "has no tokenizer.ggml.scores"),
        ({"scores": (0.0,)}, "1 items for"),
        ({"scores": (float("nan"),) * 274}, "NaN"),
        ({"unknown_token_id": 5000}, "unknown_token_id .* is 5000"),
        ({"token_type": (2, 3, 3, 1, *(6,) * 255, *(1,) * 15)}, "255 byte tokens"),
    ],
)
def test_hostile_metadata_is_refused_in_plain_words(
    sentencepiece_metadata: MakeMetadata, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_gguf(sentencepiece_metadata(**changes))
