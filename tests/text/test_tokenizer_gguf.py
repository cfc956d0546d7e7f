"""The tokenizer in a GGUF file: against recorded ids, against its own definition, against hostile metadata."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import InvalidRequest, ModelFileError
from octavo.text.byte_pair import _parse_merges
from octavo.text.pre_tokenizers import PRE_TOKENIZERS, Cut, build_pre_tokenizer
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
    assert [tokenizer.token_text(i) for i in ids] == ["hell", "o"], "the other merges are"
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
        ({"model": "bert"}, "'bert' .WordPiece, of encoders.*it has gpt2, llama, gemma4"),
        ({"model": "t5"}, "'t5' .unigram"),
        ({"model": "martian"}, "'martian', which"),
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


@pytest.mark.parametrize(
    ("pre", "published"),
    [
        ("tiny_aya", (r"\d{1,3}(?=(?:\d{3})*\b)", PRE_TOKENIZERS["gpt-4o"].patterns[0])),
        ("afmoe", (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", *PRE_TOKENIZERS["afmoe"].patterns[3:])),
        (
            "deepseek-llm",
            tuple(r"\s+$" if r"\s++$" in pattern else pattern for pattern in PRE_TOKENIZERS["deepseek-llm"].patterns),
        ),
    ],
)
def test_expressions_in_linear_time_cut_as_the_published_ones(pre: str, published: tuple[str, ...]) -> None:
    ours, theirs = (build_pre_tokenizer(cut) for cut in (PRE_TOKENIZERS[pre], Cut(published)))

    @given(text=st.lists(st.sampled_from([*"127 \n.,a²٣é世", "\u3000", "  ", "1234", "12345"])).map("".join))
    def check(text: str) -> None:
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)

    check()


def test_an_unknown_cut_is_refused_with_its_nearest(byte_level_metadata: MakeMetadata) -> None:
    with pytest.raises(ModelFileError, match="'qwen-2', which octavo does not have; nearest to it: qwen2"):
        Tokenizer.from_gguf(byte_level_metadata(pre="qwen-2"))


def with_tokens(metadata: dict[str, Any], texts: Sequence[str], kind: int = 3) -> dict[str, Any]:
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    more = {"tokenizer.ggml.tokens": (*tokens, *texts), "tokenizer.ggml.token_type": (*kinds, *[kind] * len(texts))}
    return {**metadata, **more}


def ends_of(metadata: dict[str, Any]) -> set[str]:
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.eos_token_ids <= tokenizer.control_token_ids
    return {tokenizer.token_text(i) for i in tokenizer.eos_token_ids}


def test_well_known_names_end_a_turn_whatever_their_kind(byte_level_metadata: MakeMetadata) -> None:
    metadata = byte_level_metadata()
    assert ends_of(metadata) == {"<|im_end|>", "<|endoftext|>"}
    for kind in (1, 3, 4):
        assert ends_of(with_tokens(metadata, ["<|eot_id|>", "<|end|>"], kind)) - ends_of(metadata) == {
            "<|eot_id|>",
            "<|end|>",
        }
    harmony = with_tokens(metadata, ["<|return|>", "<|call|>", "<|end|>"])
    assert ends_of(harmony) - ends_of(metadata) == {"<|return|>", "<|call|>"}  # another message follows <|end|>
    assert ends_of(with_tokens(metadata, ["</s>"], kind=1)) == ends_of(metadata)  # a tag of HTML
    assert "</s>" in ends_of(with_tokens(metadata, ["</s>"], kind=3))


def test_no_eos_is_written_behind_a_prompt_which_is_to_be_gone_on_from(byte_level_metadata: MakeMetadata) -> None:
    plain, adding = (Tokenizer.from_gguf(byte_level_metadata(add_eos_token=add)) for add in (False, True))
    assert adding.encode("hello") == plain.encode("hello")


def test_a_raw_vocabulary_spells_spaces_as_marks_and_unknown_characters_as_bytes() -> None:
    tokens = [
        "<eos>",
        "<bos>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "a",
        "\n",
        "\n\n",
        "\u2581a",
        ">",
    ]
    tokens += [">\u2581", ">\u2581a"]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tuple(tokens),
        "tokenizer.ggml.token_type": (3, 3, *[6] * 256, *[1] * 8),
        "tokenizer.ggml.merges": ("\n \n", "> \u2581", ">\u2581 a", "\u2581 a"),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,  # a mistake of such files
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode("a a> a\n\n\né")
    texts = [tokenizer.token_text(i) for i in ids]
    assert texts == ["<bos>", "a", "\u2581a", ">\u2581a", "\n\n", "\n", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "a a> a\n\n\né"
    assert not tokenizer.adds_space_prefix
