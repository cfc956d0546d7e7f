"""The tokenizer of a Hugging Face folder: as the library reads it, and as the same model's GGUF file has it."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.errors import ModelFileError
from octavo.core.steps import finish
from octavo.text.byte_pair import LibraryEncoder
from octavo.text.tokenizer import Tokenizer
from octavo.text.vocabulary import BYTE_LEVEL_ALPHABET

MERGES = [["h", "e"], ["l", "l"], ["he", "ll"], ["hell", "o"], ["Ġ", "w"]]


def added(token_id: int, content: str, *, special: bool = True, **flags: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, "special": special, **plain, **flags}


def byte_level_spec() -> dict[str, Any]:
    texts = [*BYTE_LEVEL_ALPHABET, *("".join(pair) for pair in MERGES)]
    size = len(texts)
    return {
        "version": "1.0",
        "added_tokens": [
            added(size, "<s>"),
            added(size + 1, "<|end|>", rstrip=True),
            added(size + 2, "<mask>", lstrip=True),
            added(size + 3, "<think>", special=False),
            added(size + 4, "word", special=False, single_word=True),
            added(size + 6, "<|eot_id|>"),
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [size], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {text: i for i, text in enumerate(texts)}, "merges": MERGES},
    }


def sentencepiece_spec(pre_tokenizer: dict[str, Any] | None) -> dict[str, Any]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁ab"]
    prepend = {"type": "Prepend", "prepend": "▁"}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    return {
        "version": "1.0",
        "added_tokens": [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")],
        "normalizer": None if pre_tokenizer else {"type": "Sequence", "normalizers": [prepend, spaces]},
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {text: i for i, text in enumerate(pieces)},
            "merges": ["▁ a", "▁a b"],
        },
    }


def write(folder: Path, spec: dict[str, Any], **files: Any) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            ["<s>", "<|end|>", " ", "\n", "\x1c", "\u3000", "<mask>", "<think>", "word", "hello", "</s>", "a", "b", "<"]
        ),
        st.text(max_size=3),
    ),
    max_size=8,
).map("".join)
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
SPECS = {
    "byte level": byte_level_spec(),
    "prepend": sentencepiece_spec(None),
    "metaspace first": sentencepiece_spec(METASPACE),
    "metaspace always": sentencepiece_spec({**METASPACE, "prepend_scheme": "always"}),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_text_with_special_tokens_is_read_as_the_library_reads_it(tmp_path: Path, spec: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, spec))
    library = tokenizers.Tokenizer.from_str(json.dumps(spec))

    @settings(max_examples=60)
    @given(text=TEXTS)
    def check(text: str) -> None:
        expected = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, parse_special=True, add_bos=False) == expected

    check()


def test_what_is_a_space_and_what_is_a_letter_beside_a_special_token_is_what_the_library_says(tmp_path: Path) -> None:
    """The first characters of every Unicode category, and those that Python classes otherwise."""
    first: dict[str, list[str]] = {}
    for character in map(chr, range(0x11000)):
        first.setdefault(unicodedata.category(character), []).append(character)
    characters = [c for kind, found in first.items() if kind not in ("Cs", "Cn") for c in found[:40]]
    characters += ["\x1c", "\x1f", "\x85", "\u200c", "\u200d", "\u0301", "²", "Ⓐ", "ⓩ", "🅐", "🆉"]
    tokenizer = Tokenizer.from_folder(write(tmp_path, byte_level_spec()))
    library = tokenizers.Tokenizer.from_str(json.dumps(byte_level_spec()))
    for text in (f"{c}word{c} word {c}<mask>{c}" for c in characters):
        expected = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, parse_special=True, add_bos=False) == expected, ascii(text)


def test_plain_text_never_becomes_a_control_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, byte_level_spec()))

    @settings(max_examples=60)
    @given(text=TEXTS)
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert not any(map(tokenizer.is_control, ids))
        assert tokenizer.decode(ids) == text

    check()


@pytest.mark.slow
def test_the_default_model_as_a_folder_gives_the_ids_that_its_file_gives(
    tmp_path: Path, real_tokenizer: Tokenizer, data_dir: Path
) -> None:
    texts = [real_tokenizer.token_text(i) for i in range(real_tokenizer.vocab_size)]
    splits = [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    ]
    encoder = real_tokenizer._encoder
    merges = json.loads(encoder._pipeline.to_str())["model"]["merges"]  # type: ignore[attr-defined]
    spec = {
        "version": "1.0",
        "added_tokens": [added(i, texts[i]) for i in sorted(real_tokenizer.control_token_ids)],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{**split, "trim_offsets": True} for split in splits]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {text: i for i, text in enumerate(texts)}, "merges": merges},
    }
    config = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "chat_template": "x"}
    tokenizer = Tokenizer.from_folder(
        write(tmp_path, spec, tokenizer_config=config, generation_config={"eos_token_id": 2})
    )
    for case in json.loads((data_dir / "tokens_smollm2.json").read_text()):
        assert tokenizer.encode(case["text"], parse_special=True) == case["ids"]
    assert all(tokenizer.token_bytes(i) == real_tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.eos_token_ids) == (1, 2, {2})


def test_the_files_beside_it_are_honoured(tmp_path: Path) -> None:
    spec = byte_level_spec()
    size = len(spec["model"]["vocab"])
    write(
        tmp_path,
        spec,
        special_tokens_map={"bos_token": "<s>", "eos_token": {"content": "<mask>"}},
        tokenizer_config={
            "eos_token": "<|end|>",
            "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}],
        },
        generation_config={"eos_token_id": [size + 1, size + 6]},
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == size + 7
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (size, size + 1)
    assert tokenizer.eos_token_ids == {size + 1, size + 6}
    assert tokenizer.chat_template == "d"
    assert tokenizer.add_bos  # by the post-processor
    assert tokenizer.encode("hello") == [size, size - 2]
    (tmp_path / "chat_template.jinja").write_text("from the file ✓", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": False}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.chat_template == "from the file ✓"
    assert not tokenizer.add_bos


def test_sentencepiece_folders_spell_bytes_and_spaces(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, sentencepiece_spec(None)))
    ids = tokenizer.encode("ab é")
    assert b"".join(map(tokenizer.token_bytes, ids)) == " ab é".encode()
    assert tokenizer.decode(ids) == "ab é"
    assert tokenizer.adds_space_prefix


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "has no model"),
        ({"model": {"type": "WordPiece", "vocab": {}}}, "'WordPiece'"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}, "empty vocabulary"),
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": []}}, "'b' the id 0"),
        ({"model": {"type": "BPE", "vocab": {"a": 1 << 60}, "merges": []}}, "the id 1152921504606846976"),
        ({"model": {"type": "BPE", "vocab": {"a": "x"}, "merges": []}}, "the id 'x'"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b c"]}}, "'a b c'"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a z"]}}, "cannot be used"),
        ({"added_tokens": [7]}, "added token .* is 7"),
        ({"added_tokens": [{"id": 0, "content": "other"}]}, "gives id 0 to both"),
        ({"added_tokens": [{"id": -1, "content": "x"}]}, "id is -1"),
        ({"added_tokens": [{"id": 999, "content": "a"}]}, "are both 'a'"),
        ({"pre_tokenizer": None, "decoder": {"type": "WordPiece"}}, "WordPiece.*ByteLevel"),
        ({"pre_tokenizer": {"type": "Nonsense"}}, "cannot be used"),
    ],
)
def test_a_hostile_folder_is_refused_in_plain_words(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_folder(write(tmp_path, {**byte_level_spec(), **change}))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": [1]}, "tokenizer_config.json holds no JSON object"),
        ({"tokenizer_config": {"bos_token": "nowhere"}}, "bos_token is 'nowhere'"),
        ({"tokenizer_config": {"bos_token": 7}}, "bos_token is 7"),
        ({"tokenizer_config": {"add_bos_token": "yes"}}, "add_bos_token .* must be of type bool"),
        ({"tokenizer_config": {"chat_template": 7}}, "chat_template .* is 7"),
        ({"generation_config": {"eos_token_id": "2"}}, "'2', which is no token id"),
        ({"generation_config": {"eos_token_id": [9999]}}, "is 9999 but the vocabulary"),
    ],
)
def test_hostile_files_beside_it_are_refused_in_plain_words(
    tmp_path: Path, files: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_folder(write(tmp_path, byte_level_spec(), **files))


def test_a_folder_without_the_file_or_with_broken_json_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    for broken in (b"{", b"\xff", b"[" * 100_000):
        (tmp_path / "tokenizer.json").write_bytes(broken)
        with pytest.raises(ModelFileError, match=r"tokenizer\.json is not JSON"):
            Tokenizer.from_folder(tmp_path)


def unigram_spec() -> dict[str, Any]:
    spec = sentencepiece_spec({**METASPACE, "prepend_scheme": "always"})
    pieces = list(spec["model"]["vocab"])
    scores = [0.0] * 259 + [-9.0, -4.0, -4.5, -5.0, -6.0]
    vocab = [[piece, score] for piece, score in zip(pieces, scores, strict=True)]
    spec["model"] = {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": True}
    return spec


def test_a_unigram_folder_is_read_as_the_library_reads_it_and_cannot_be_forged(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, unigram_spec()))
    library = tokenizers.Tokenizer.from_str(json.dumps(unigram_spec()))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("ab b")] == ["\u2581ab", "\u2581", "b"]

    @settings(max_examples=60)
    @given(text=TEXTS)
    def check(text: str) -> None:
        expected = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, parse_special=True, add_bos=False) == expected
        plain = tokenizer.encode(text)
        assert not tokenizer.control_token_ids.intersection(plain)
        assert tokenizer.decode(plain) == text.removeprefix(" ")  # Metaspace puts no space before one

    check()


@pytest.mark.parametrize("entry", [["a"], ["a", "b"], "a", [1, 2.0], ["a", True]])
def test_a_hostile_unigram_vocabulary_is_refused(tmp_path: Path, entry: Any) -> None:
    spec = unigram_spec()
    spec["model"]["vocab"][5] = entry
    with pytest.raises(ModelFileError, match=r"token 5 of tokenizer.json is .* not a text with its score"):
        Tokenizer.from_folder(write(tmp_path, spec))


def test_words_of_a_folder_that_marks_spaces_are_cut_apart(tmp_path: Path) -> None:
    """As Llama 2's: every text between special tokens begins with a space, but not what follows a cut."""
    tokenizer = Tokenizer.from_folder(write(tmp_path, sentencepiece_spec(None)))
    text = "ab  a b " * 3000
    assert 0 < tokenizer._encoder.cut(text, 0, 1000) <= 1000
    library = tokenizers.Tokenizer.from_str(json.dumps(sentencepiece_spec(None)))
    assert tokenizer.encode(text, add_bos=False) == library.encode(text, add_special_tokens=False).ids


def test_ends_come_from_the_generation_config_else_from_the_config_and_from_the_template(tmp_path: Path) -> None:
    spec = byte_level_spec()
    size = len(spec["model"]["vocab"])
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<mask>{% endfor %}"
    files: dict[str, Any] = {"tokenizer_config": {"bos_token": "<s>"}, "config": {"eos_token_id": [size + 1, size + 6]}}
    assert Tokenizer.from_folder(write(tmp_path, spec, **files)).eos_token_ids == {size + 1, size + 6}
    files["generation_config"] = {"eos_token_id": size + 6}
    files["tokenizer_config"]["chat_template"] = template
    assert Tokenizer.from_folder(write(tmp_path, spec, **files)).eos_token_ids == {size + 2, size + 6}


def test_only_the_first_text_of_all_is_encoded_as_a_beginning() -> None:
    def pipeline() -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "▁": 2}, []))

    first = pipeline()
    first.normalizer = tokenizers.normalizers.Prepend("▁")
    encoder = LibraryEncoder(first, later=pipeline())
    assert finish(encoder.encode_steps(["a", "b"], at_start=True)) == [[2, 0], [1]]
    assert finish(encoder.encode_steps(["a", "b"], at_start=False)) == [[0], [1]]
