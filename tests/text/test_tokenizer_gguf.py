"""The tokenizer in a GGUF file: against recorded ids, against its own definition, against hostile metadata."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import InvalidRequest, ModelFileError
from octavo.text.byte_pair import _parse_merges
from octavo.text.pre_tokenizers import PRE_TOKENIZERS, build_pre_tokenizer
from octavo.text.tokenizer import Tokenizer

MakeMetadata = Callable[..., dict[str, Any]]


def test_the_default_model_gives_the_recorded_ids(real_tokenizer: Tokenizer, data_dir: Path) -> None:
    cases = json.loads((data_dir / "tokens_smollm2.json").read_text())
    for case in cases:
        assert real_tokenizer.encode(case["text"], parse_special=True) == case["ids"], case["text"]
    assert len(cases) > 30


def test_the_default_model_names_its_special_tokens(real_tokenizer: Tokenizer) -> None:
    assert (real_tokenizer.vocab_size, real_tokenizer.bos_token_id, real_tokenizer.eos_token_id) == (49152, 1, 2)
    assert real_tokenizer.eos_token_ids == {0, 2}
    assert not real_tokenizer.add_bos
    assert real_tokenizer.chat_template is not None
    assert real_tokenizer.token_bytes(2) == b"<|im_end|>"
    assert real_tokenizer.is_control(2)


@given(text=st.text())
def test_decoding_undoes_encoding(small_tokenizer: Tokenizer, text: str) -> None:
    assert small_tokenizer.decode(small_tokenizer.encode(text)) == text


@given(
    parts=st.lists(st.one_of(st.sampled_from(["<|im_start|>", "<|im_", "start|>", "[INST]", "<"]), st.text(max_size=3)))
)
def test_plain_text_never_becomes_a_control_token(small_tokenizer: Tokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    ids = small_tokenizer.encode(text)
    assert not any(map(small_tokenizer.is_control, ids))
    assert small_tokenizer.decode(ids) == text


def test_control_tokens_count_only_where_asked_and_user_defined_ones_always(small_tokenizer: Tokenizer) -> None:
    text = "hello<|im_end|><think>"
    think = small_tokenizer.vocab_size - 2
    assert small_tokenizer.encode(text, parse_special=True)[1:] == [2, think]
    plain = small_tokenizer.encode(text)
    assert plain[-1] == think
    assert 2 not in plain


def test_a_merge_that_would_make_a_control_token_is_not_applied(byte_level_metadata: MakeMetadata) -> None:
    metadata = byte_level_metadata()
    kinds = list(metadata["tokenizer.ggml.token_type"])
    hello = metadata["tokenizer.ggml.tokens"].index("hello")
    kinds[hello] = 3
    tokenizer = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.token_type": kinds})
    ids = tokenizer.encode("hello")
    assert hello not in ids
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.encode("hello", parse_special=True) == [hello]


def test_bos_is_added_as_the_file_says_or_as_asked(byte_level_metadata: MakeMetadata) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(add_bos_token=True))
    with_bos = tokenizer.encode("hello")
    assert with_bos[0] == 1
    assert tokenizer.encode("hello", add_bos=False) == with_bos[1:]
    assert Tokenizer.from_gguf(byte_level_metadata(pre="llama-bpe")).add_bos
    assert not Tokenizer.from_gguf(byte_level_metadata(pre="llama-bpe", bos_token_id=None)).add_bos


def test_a_token_that_ends_turns_is_a_control_token_even_if_the_file_forgot(byte_level_metadata: MakeMetadata) -> None:
    metadata = byte_level_metadata(token_type=None)
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.is_control(1)
    assert tokenizer.is_control(2)
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [2]
    assert 2 not in tokenizer.encode("<|im_end|>")


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'm 123  go", ["I", "'m", " 123", " ", " go"]),
        ("smollm", "v12 3", ["v", "1", "2", " ", "3"]),
        ("llama-bpe", "12345 I'M\n\nx", ["123", "45", " I", "'M", "\n\n", "x"]),
        ("qwen2", "12345 x", ["1", "2", "3", "4", "5", " x"]),
        ("default", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
    ],
)
def test_text_is_cut_as_the_model_was_trained(pre: str, text: str, pieces: list[str]) -> None:
    cut = build_pre_tokenizer(PRE_TOKENIZERS[pre]).pre_tokenize_str(text)
    decoder = tokenizers.decoders.ByteLevel()
    assert [decoder.decode([piece]) for piece, _ in cut] == pieces


def test_llama_bpe_takes_a_whole_piece_that_is_a_token_without_asking_the_merges(
    byte_level_metadata: MakeMetadata,
) -> None:
    metadata = byte_level_metadata()
    tokens = (*metadata["tokenizer.ggml.tokens"], "xyz")
    kinds = (*metadata["tokenizer.ggml.token_type"], 1)
    changed = {**metadata, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    assert len(Tokenizer.from_gguf(changed).encode("xyz")) == 3
    assert Tokenizer.from_gguf({**changed, "tokenizer.ggml.pre": "llama-bpe"}).encode("xyz", add_bos=False) == [
        len(tokens) - 1
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "has no tokenizer.ggml.model"),
        ({"model": "bert"}, "'bert'"),
        ({"model": 7}, "must be of type str"),
        ({"pre": "martian"}, "'martian'.*smollm"),
        ({"tokens": None}, "has no tokenizer.ggml.tokens"),
        ({"tokens": ()}, "is empty"),
        ({"tokens": "abc"}, "must be a list"),
        ({"tokens": ("a", 1)}, "items of type int"),
        ({"tokens": ("a", "b", "a"), "token_type": None}, "tokens 0 and 2 .* are both 'a'"),
        ({"token_type": (1,)}, "1 items for"),
        ({"token_type": (9,) * 275}, "9, which is no kind"),
        ({"token_type": (6,) * 275}, "byte token"),
        ({"merges": None}, "has no tokenizer.ggml.merges"),
        ({"merges": ("he",)}, "'he'.*not two tokens"),
        ({"merges": ("h zzz",)}, "'zzz'"),
        ({"merges": ("x y",)}, "'xy'"),
        ({"eos_token_id": 1 << 40}, "eos_token_id .* is 1099511627776"),
        ({"bos_token_id": -1}, "bos_token_id .* is -1"),
        ({"eot_token_id": True}, "must be of type int"),
    ],
)
def test_hostile_metadata_is_refused_in_plain_words(
    byte_level_metadata: MakeMetadata, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_gguf(byte_level_metadata(**changes))


def test_half_a_surrogate_pair_is_refused(small_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"character 2 .* U\+D800"):
        small_tokenizer.encode("ab\ud800")


def test_several_threads_encode_alike(real_tokenizer: Tokenizer) -> None:
    texts = [f"thread {i}: Zürich 12345 你好 <|im_start|>\n" * 50 for i in range(16)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(real_tokenizer.encode, texts)) == [real_tokenizer.encode(text) for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["x", "<|im_start", "<|im_start|>", " ", "Zürich 12345 你好\n", "\n", "1"])
def test_a_megabyte_of_anything_is_encoded_in_seconds(real_tokenizer: Tokenizer, unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    start = time.process_time()
    ids = real_tokenizer.encode(text)
    assert time.process_time() - start < 10
    assert real_tokenizer.decode(ids) == text


def test_the_left_part_of_a_merge_may_begin_with_a_space() -> None:
    assert _parse_merges(["  x"]) == [(" ", "x")]
    assert _parse_merges(["h e", " a b", "x "]) == [("h", "e"), (" a", "b"), ("x", "")]
