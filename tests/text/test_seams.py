"""Texts that are encoded piece by piece: the same ids, and as little work as can be for one that cannot fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.core.errors import InvalidRequest, PromptTooLong
from octavo.core.limits import MAX_MERGE_CHARS, MAX_RUN_CHARS
from octavo.core.steps import finish
from octavo.text import pre_tokenizers, tokenizer
from octavo.text.chat_template import ChatTemplate
from octavo.text.pre_tokenizers import PRE_TOKENIZERS, cut_at_seam
from octavo.text.tokenizer import Tokenizer
from octavo.text.vocabulary import BYTE_LEVEL_ALPHABET

WORDS = (
    "hello", "Hell", "o'r", "don't", "'s", " ", "  ", "\n", "\r\n", "\t", " \n ", ".", "...", "12", "3456", "é",
    "e\u0301", "я", "你好", "世界。", "\uff0c", "ﾊ", "\u180e", "\u00a0", "\x1c", "\u200d", "👍🏽", "ß", "İ",
    "\u017f", "¼", "Ⅷ", "_", "-", "(", ")", "<think>", "<|im_start|>", "=", "/", "\ue000", "aaa", "a" * 20,
    "\U0001f600", "क्", "ิ", "ไทย",
)  # fmt: skip
texts = st.lists(st.sampled_from(WORDS) | st.characters(exclude_categories=["Cs"]), max_size=40).map("".join)

# What some expressions keep together where others cut: words with spaces between, digits before a letter, spaces behind
# what is no word, letters without case, a token that joins two words.
STICKING = "ab cd ef 1234a 12a $  a\u05e9  \u05e9 .  b hell w"
CUTS = sorted({cut: name for name, cut in PRE_TOKENIZERS.items()}.values())  # one name for each


@pytest.fixture
def tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "PIECE_CHARS", 3)


def one_call(model: Tokenizer, text: str, *, parse_special: bool) -> list[int]:
    """What the encoder makes of the pieces between special tokens, uncut."""
    matcher = model.special_tokens if parse_special else model._user_defined
    pieces = matcher.split(text)
    puts_bos = model.add_bos and model.bos_token_id is not None and pieces[:1] != [model.bos_token_id]  # written: once
    ids: list[int] = [model.bos_token_id] if puts_bos else []  # type: ignore[list-item]
    for index, piece in enumerate(pieces):
        if isinstance(piece, int):
            ids.append(piece)
        else:
            ids += finish(model._encoder.encode_steps([piece], at_start=index == 0))[0]
    return ids


def model_with(pre: str, byte_level_metadata: Callable[..., dict[str, Any]]) -> Tokenizer:
    """That cut before a small vocabulary; with the byte tokens that a raw one has."""
    metadata = byte_level_metadata(pre=pre)
    if PRE_TOKENIZERS[pre].raw:
        metadata["tokenizer.ggml.tokens"] += (*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "l▁", "l▁w")
        metadata["tokenizer.ggml.token_type"] += (*[6] * 256, 1, 1, 1)
        metadata["tokenizer.ggml.merges"] += ("l ▁", "l▁ w")
    return Tokenizer.from_gguf(metadata)


@pytest.mark.parametrize("pre", CUTS)
@pytest.mark.usefixtures("tiny_pieces")
def test_byte_level_ids_do_not_depend_on_where_the_text_is_cut(
    pre: str, byte_level_metadata: Callable[..., dict[str, Any]]
) -> None:
    model = model_with(pre, byte_level_metadata)

    @settings(max_examples=50)
    @example(text=STICKING, parse_special=False)
    @given(text=texts, parse_special=st.booleans())
    def check(text: str, parse_special: bool) -> None:
        assert model.encode(text, parse_special=parse_special) == one_call(model, text, parse_special=parse_special)

    check()


@pytest.mark.parametrize("pre", CUTS)
def test_every_seam_is_a_boundary_of_the_expressions_whatever_stands_around_it(
    pre: str, byte_level_metadata: Callable[..., dict[str, Any]]
) -> None:
    encoder = model_with(pre, byte_level_metadata)._encoder
    pipeline, seams = encoder._pipeline, encoder._seam  # type: ignore[attr-defined]

    def split(text: str) -> list[str]:
        normal = text if pipeline.normalizer is None else pipeline.normalizer.normalize_str(text)
        return [piece for piece, _ in pipeline.pre_tokenizer.pre_tokenize_str(normal)]

    @settings(max_examples=50)
    @example(text=STICKING)
    @given(text=texts)
    def check(text: str) -> None:
        for seam in seams.finditer(text):
            assert split(text[: seam.end()]) + split(text[seam.end() :]) == split(text)

    check()


@pytest.mark.usefixtures("tiny_pieces")
@given(text=st.text("abclo ▁é\n.", max_size=60), parse_special=st.booleans())
def test_sentencepiece_ids_do_not_depend_on_where_the_text_is_cut(
    sentencepiece_metadata: Callable[..., dict[str, Any]], text: str, parse_special: bool
) -> None:
    model = Tokenizer.from_gguf(sentencepiece_metadata())
    assert model.encode(text, parse_special=parse_special) == one_call(model, text, parse_special=parse_special)


@pytest.mark.usefixtures("tiny_pieces")
@given(contents=st.lists(texts, min_size=1, max_size=3))
def test_a_chat_has_the_same_ids_however_its_text_is_cut(small_tokenizer: Tokenizer, contents: list[str]) -> None:
    assert small_tokenizer.chat_template is not None
    template = ChatTemplate(small_tokenizer.chat_template, small_tokenizer)
    messages = [{"role": "user", "content": content} for content in contents]
    try:
        ids = template.encode(messages)
    except InvalidRequest:
        assert any("\ue000" <= char <= "\uf8ff" for content in contents for char in content)
        return
    expected: list[int] = []
    start, end = (small_tokenizer.encode(f"<|im_{name}|>", parse_special=True) for name in ("start", "end"))
    for content in contents:
        whole = f"user\n{content}"
        expected += [*start, *one_call(small_tokenizer, whole, parse_special=False), *end]
        expected += one_call(small_tokenizer, "\n", parse_special=False)
    del expected[-len(one_call(small_tokenizer, "\n", parse_special=False)) :]
    expected += [*one_call(small_tokenizer, "\n", parse_special=False), *start]
    expected += one_call(small_tokenizer, "assistant\n", parse_special=False)
    assert ids == expected


@given(text=texts, start=st.integers(0, 30), size=st.integers(1, 30))
def test_a_cut_goes_on_and_ends_at_a_seam_or_the_end(text: str, start: int, size: int) -> None:
    start = min(start, max(len(text) - 1, 0))
    cut = cut_at_seam(text, start, size)
    ends = {seam.end() for seam in pre_tokenizers.SEAM.finditer(text)} | {len(text)}
    assert cut in ends
    assert cut > start or not text
    assert cut <= start + size or not {end for end in ends if start < end <= start + size}


class CountingEncoder:
    """Passes on, and counts, what an encoder is given."""

    def __init__(self, model: Tokenizer) -> None:
        self._encoder = model._encoder
        self.max_run = model._encoder.max_run
        self.cut = model._encoder.cut
        self.num_chars: list[int] = []

    def encode_steps(self, texts: list[str], **where: Any) -> Any:
        self.num_chars.append(sum(map(len, texts)))
        return self._encoder.encode_steps(texts, **where)


def counting(model: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> CountingEncoder:
    encoder = CountingEncoder(model)
    monkeypatch.setattr(model, "_encoder", encoder)
    return encoder


def test_a_text_whose_bytes_alone_are_too_many_is_refused_before_anything_is_encoded(
    small_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = counting(small_tokenizer, monkeypatch)
    longest = max(map(len, small_tokenizer.bytes_by_id))
    for text in ("x" * (100 * longest + 1), "é" * (50 * longest + 1)):
        with pytest.raises(PromptTooLong, match=r"maximum context length is 100 tokens.* at least 101"):
            finish(small_tokenizer.encode_steps(text, max_tokens=100))
    assert encoder.num_chars == []
    tokens = small_tokenizer.encode("<|endoftext|>" * 100, parse_special=True, add_bos=False)
    assert len(tokens) == 100  # the longest token: as many bytes as fit are not refused
    steps = small_tokenizer.encode_steps("<|endoftext|>" * 100, parse_special=True, add_bos=False, max_tokens=100)
    assert finish(steps) == tokens


def test_a_chat_is_measured_by_what_its_text_means_not_by_its_disguise(
    byte_level_metadata: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every "<" of a message is a private-use character of three bytes until the template is done with it."""
    model = Tokenizer.from_gguf(byte_level_metadata())
    template = ChatTemplate("{{ messages[0].content }}", model)
    monkeypatch.setattr(model, "_max_token_bytes", 1)
    text = "<" * 100
    assert len(finish(template.encode_steps([{"role": "user", "content": text}], max_tokens=100))) == 100


def test_encoding_ends_soon_after_the_ids_are_too_many(
    small_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = counting(small_tokenizer, monkeypatch)
    text = "hello world. " * 20_000
    with pytest.raises(PromptTooLong, match="at least"):
        finish(small_tokenizer.encode_steps(text, max_tokens=30_000))
    assert sum(encoder.num_chars) <= 60_000
    assert max(encoder.num_chars) <= pre_tokenizers.PIECE_CHARS


def test_special_tokens_are_counted_while_they_are_looked_for(
    small_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = counting(small_tokenizer, monkeypatch)
    monkeypatch.setattr(small_tokenizer, "_max_token_bytes", None)
    with pytest.raises(PromptTooLong):
        finish(small_tokenizer.encode_steps("<|im_end|>x" * 50_000, parse_special=True, max_tokens=100))
    assert encoder.num_chars == []


def test_a_run_without_a_seam_is_refused_from_a_server_and_taken_offline(small_tokenizer: Tokenizer) -> None:
    text = "a" * (MAX_RUN_CHARS + 2 * pre_tokenizers.PIECE_CHARS)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_RUN_CHARS}"):
        finish(small_tokenizer.encode_steps(text, max_tokens=10**9))
    assert len(small_tokenizer.encode(text, add_bos=False)) == len(text)
    fits = "a" * MAX_RUN_CHARS + " " + "b" * MAX_RUN_CHARS
    assert len(finish(small_tokenizer.encode_steps(fits, add_bos=False, max_tokens=10**9))) == len(fits)


def test_a_word_that_sentencepiece_would_have_to_merge_is_bounded(
    sentencepiece_metadata: Callable[..., dict[str, Any]],
) -> None:
    model = Tokenizer.from_gguf(sentencepiece_metadata())
    with pytest.raises(InvalidRequest, match=f"at most {MAX_MERGE_CHARS}"):
        finish(model.encode_steps("ab" * MAX_MERGE_CHARS, max_tokens=10**9))


def folder(path: Path, **changes: Any) -> Tokenizer:
    spec = {
        "model": {"type": "BPE", "vocab": {char: i for i, char in enumerate(BYTE_LEVEL_ALPHABET)}, "merges": []},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    } | changes  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(spec))
    return Tokenizer.from_folder(path)


LLAMA3 = {"type": "Split", "pattern": {"Regex": pre_tokenizers._LLAMA3}, "behavior": "Isolated", "invert": False}
AFTER = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def after_split(**changes: Any) -> dict[str, Any]:
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [LLAMA3 | changes, AFTER]}}


@pytest.mark.parametrize(
    ("changes", "has_seams", "max_bytes"),
    [
        ({}, True, 1),
        ({"normalizer": {"type": "NFC"}}, True, 4),
        (after_split(), True, 1),
        (after_split(pattern={"Regex": ".+"}), False, 1),
        (after_split(behavior="Removed"), False, None),
        ({"pre_tokenizer": AFTER}, False, 1),
        ({"pre_tokenizer": {**AFTER, "add_prefix_space": True, "use_regex": True}}, False, 1),
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, False, None),
    ],
)  # fmt: skip
def test_a_folder_s_pipeline_is_cut_only_where_its_expressions_are_known(
    tmp_path: Path, changes: dict[str, Any], has_seams: bool, max_bytes: int | None
) -> None:
    model = folder(tmp_path, **changes)
    text = "hello world. " * 2000
    cut = model._encoder.cut(text, 0, 1000)
    assert 0 < cut <= 1000 if has_seams else cut == len(text)
    assert model._max_token_bytes == max_bytes
