"""Real vocabularies: against llama.cpp's ids, the ``sentencepiece`` library and the ``tokenizers`` library."""

from __future__ import annotations

import json
import os
import struct
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from random_texts import random_texts

from octavo.text.pre_tokenizers import _ROWS, PRE_TOKENIZERS, build_pre_tokenizer
from octavo.text.tokenizer import Tokenizer
from octavo.text.vocabulary import TokenKind
from octavo.weights.gguf_file import GGUFFile

DATA = Path(__file__).parents[1] / "data"
NAMES = [  # Gemma 4's takes seconds to read
    pytest.param(name, marks=pytest.mark.slow) if name == "gemma-4" else name
    for name in sorted(path.stem.removeprefix("tokens_") for path in (DATA / "vocab").glob("tokens_*.json"))
]
MANY = pytest.param(10_000, marks=pytest.mark.slow)


def vocabulary_file(name: str) -> Path:
    """A vocabulary without weights, out of $OCTAVO_SHARED_DATA or the folder shared/data beside this repository."""
    folder = Path(os.environ.get("OCTAVO_SHARED_DATA", DATA.parents[2] / "shared" / "data"))
    path = folder / "vocab" / f"{name}.gguf"
    if not path.is_file():
        pytest.skip(f"no {path}; tests/data/README.md says where vocabularies come from")
    return path


@cache
def metadata_of(name: str) -> dict[str, Any]:
    file = GGUFFile(vocabulary_file(name))
    try:
        return dict(file.metadata)
    finally:
        file.close()


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer.from_gguf(metadata_of(name))


def cases_of(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((DATA / "vocab" / f"tokens_{name}.json").read_text(encoding="utf-8"))
    return cases


@pytest.mark.parametrize("name", NAMES)
def test_every_id_is_that_of_llama_cpp(name: str) -> None:
    tokenizer = tokenizer_of(name)
    cases = cases_of(name)
    for case in cases:
        for parse_special in (False, True):
            ids = tokenizer.encode(case["text"], parse_special=parse_special, add_bos=False)
            assert ids == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"]) == case["text"]
    assert len(cases) > 20


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_a_real_file_gives_the_ids_of_llama_cpp(name: str) -> None:
    """Of the two model files of tests/data/README.md, where $OCTAVO_TEST_QWEN2 or $OCTAVO_TEST_GEMMA3 names one."""
    path = os.environ.get(f"OCTAVO_TEST_{name.upper()}")
    if path is None:
        pytest.skip(f"OCTAVO_TEST_{name.upper()} names no file")
    file = GGUFFile(Path(path))
    try:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    finally:
        file.close()
    for case in json.loads((DATA / f"tokens_{name}.json").read_text(encoding="utf-8")):
        assert tokenizer.encode(case["text"], parse_special=True, add_bos=False) == case["ids"], case["text"]


@pytest.mark.parametrize(
    ("name", "adds_bos", "ends"),
    [
        ("deepseek-llm", True, ["<\uff5cend\u2581of\u2581sentence\uff5c>"]),
        pytest.param("gemma-4", True, ["<eos>", "<|tool_response>", "<turn|>"], marks=pytest.mark.slow),
        ("llama-bpe", True, ["<|end_of_text|>", "<|eot_id|>"]),
        ("llama-spm", True, ["</s>"]),
        ("phi-3", True, ["<|endoftext|>", "<|end|>"]),
        ("qwen35", False, ["<|endoftext|>", "<|im_end|>"]),
        ("refact", False, ["<|endoftext|>"]),
    ],
)
def test_each_family_begins_and_ends_texts_as_it_does(name: str, adds_bos: bool, ends: list[str]) -> None:
    tokenizer = tokenizer_of(name)
    assert tokenizer.add_bos == adds_bos
    assert [tokenizer.token_text(i) for i in sorted(tokenizer.eos_token_ids)] == ends
    assert all(map(tokenizer.is_control, tokenizer.eos_token_ids))
    assert (tokenizer.encode("x")[0] == tokenizer.bos_token_id) == adds_bos


@pytest.mark.parametrize("count", [200, MANY])
@pytest.mark.parametrize("name", NAMES)
def test_random_text_survives_and_its_control_tokens_stay_text(name: str, count: int) -> None:
    tokenizer = tokenizer_of(name)
    for text in random_texts(count, seed=1, special=[token.text for token in tokenizer.control_tokens]):
        ids = tokenizer.encode(text, add_bos=False)
        assert not tokenizer.control_token_ids.intersection(ids)
        assert tokenizer.decode(ids) == (text if name in BYTE_LEVEL else text.replace("\u2581", " ")), ascii(text)


BYTE_LEVEL = ("deepseek-llm", "llama-bpe", "qwen35", "refact")


def test_phi_3_swallows_white_space_behind_its_marks_as_its_tokenizer_json_does() -> None:
    tokenizer = Tokenizer.from_gguf(metadata_of("phi-3"))
    marks = tokenizer.encode("<|user|>\nHi<|end|>\n<|assistant|>\n", parse_special=True, add_bos=False)
    assert marks == tokenizer.encode("<|user|>Hi<|end|><|assistant|>", parse_special=True, add_bos=False)
    assert len(tokenizer.encode("<|endoftext|>\n", parse_special=True, add_bos=False)) > 1


# Where llama.cpp's expressions know no case of letters, or count from the right across a letter: (cut, text)
OTHERWISE = {("tiny_aya", 3), ("tiny_aya", 17), ("youtu", 3), ("kimi-k2", 3)}


@cache
def pipeline_of(pre: str) -> tokenizers.Tokenizer:
    tokenizer = Tokenizer.from_gguf({**metadata_of("llama-bpe"), "tokenizer.ggml.pre": pre})
    pipeline: tokenizers.Tokenizer = tokenizer._encoder._pipeline  # type: ignore[attr-defined]
    return pipeline


@pytest.mark.parametrize("pre", [names.split()[0] for names, cut in _ROWS if not cut.raw])
def test_text_is_cut_as_llama_cpp_cuts_it(pre: str) -> None:
    recorded = json.loads((DATA / "cuts_llama_bpe.json").read_text(encoding="utf-8"))
    cut = PRE_TOKENIZERS[pre]
    pipeline = pipeline_of("llama-bpe" if cut.ignore_merges else "smaug-bpe")  # built once, and cut as the other is
    pipeline.pre_tokenizer = build_pre_tokenizer(cut)
    ids = [encoding.ids for encoding in pipeline.encode_batch_fast(recorded["texts"], add_special_tokens=False)]
    differ = {(pre, index) for index, expected in enumerate(recorded["ids"][pre]) if ids[index] != expected}
    assert differ == {pair for pair in OTHERWISE if pair[0] == pre}


def protobuf_field(number: int, value: int | float | str | bytes) -> bytes:
    """One field of a protocol buffer message (https://protobuf.dev/programming-guides/encoding)."""
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def sentencepiece_model(metadata: dict[str, Any]) -> bytes:
    """The vocabulary as a sentencepiece.ModelProto: BPE with byte fallback, text as it is, a space before it."""
    kinds = {TokenKind.UNKNOWN: 2, TokenKind.CONTROL: 3, TokenKind.USER_DEFINED: 4, TokenKind.UNUSED: 5}
    rows = zip(*(metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")), strict=True)
    pieces = []
    for text, score, kind in rows:
        kind = 2 if text == "<unk>" else 5 if kind == TokenKind.UNKNOWN else kinds.get(kind, kind)  # one unknown
        pieces.append(protobuf_field(1, text) + protobuf_field(2, float(score)) + protobuf_field(3, int(kind)))
    trainer = protobuf_field(3, 2) + protobuf_field(35, 1)
    normaliser = protobuf_field(1, "identity") + b"".join(protobuf_field(n, v) for n, v in ((3, 1), (4, 0), (5, 1)))
    parts = [*((1, piece) for piece in pieces), (2, trainer), (3, normaliser)]
    return b"".join(protobuf_field(number, part) for number, part in parts)


@pytest.mark.parametrize("count", [1000, MANY])
@pytest.mark.parametrize("name", ["llama-spm", "phi-3"])
def test_random_text_has_the_ids_of_the_sentencepiece_library(name: str, count: int) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    library = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(metadata_of(name)))
    tokenizer = tokenizer_of(name)
    user_defined = [token.text for token in tokenizer.user_defined_tokens]
    for text in random_texts(count, seed=2):
        if "\0" in text or any(token in text for token in user_defined):
            continue
        assert tokenizer.encode(text, add_bos=False) == library.encode(text), ascii(text)


SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
WORDS = r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
# The models' own tokenizer.json: what comes before merging.
PIPELINES: dict[str, dict[str, Any]] = {
    "llama-bpe": {"split": CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+" + WORDS, "model": {"ignore_merges": True}},
    "qwen35": {
        "split": CONTRACTIONS
        + r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "normalizer": {"type": "NFC"},
    },
    "refact": {"digits": True},
    "gemma-4": {
        "raw": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        "normalizer": REPLACE,
    },
    "llama-spm": {
        "raw": None,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, REPLACE]},
    },
}


def merges_of(metadata: dict[str, Any]) -> list[tuple[str, str]]:
    """The file's, or those that its scores amount to (as transformers' converter makes them)."""
    if "tokenizer.ggml.merges" in metadata:
        pairs = (merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"])
        return [(left, right) for left, right in pairs]
    ids = {text: i for i, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores = metadata["tokenizer.ggml.scores"]
    merges = [
        (scores[token_id], ids[text[:at]], ids[text[at:]], text[:at], text[at:])
        for text, token_id in ids.items()
        for at in range(1, len(text))
        if text[:at] in ids and text[at:] in ids
    ]
    merges.sort(key=lambda merge: (-merge[0], merge[1], merge[2]))
    return [merge[3:] for merge in merges]


def folder_spec(name: str, pipeline: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json with the vocabulary of the GGUF file and the published pipeline."""
    metadata = metadata_of(name)
    texts, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    raw = "raw" in pipeline
    before = [{**SPLIT, "pattern": {"Regex": pipeline["split"]}}] if "split" in pipeline else []
    if pipeline.get("digits"):
        before = [{"type": "Digits", "individual_digits": True}]
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": texts[i], "special": kind != TokenKind.USER_DEFINED, **flags}
            for i, kind in enumerate(kinds)
            if kind in (TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN)
        ],
        "normalizer": pipeline.get("normalizer"),
        "pre_tokenizer": pipeline["raw"]
        if raw
        else {"type": "Sequence", "pretokenizers": [*before, {**BYTES, "use_regex": "split" not in pipeline}]},
        "decoder": {"type": "ByteFallback"} if raw else {**BYTES, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {text: i for i, text in enumerate(texts)},
            "merges": merges_of(metadata),
            **({"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True} if raw else {}),
            **pipeline.get("model", {}),
        },
    }


@pytest.fixture(params=PIPELINES)
def folder_and_library(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Tokenizer, Any]:
    name: str = request.param
    text = json.dumps(folder_spec(name, PIPELINES[name]))
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    return name, Tokenizer.from_folder(tmp_path), tokenizers.Tokenizer.from_str(text)


@pytest.mark.slow
def test_random_text_has_the_ids_of_the_tokenizers_library(
    folder_and_library: tuple[str, Tokenizer, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder's tokenizer; cut into small pieces too. Where the pipelines agree, the GGUF file's as well."""
    name, tokenizer, library = folder_and_library
    texts = random_texts(10_000, seed=3, special=[token.text for token in tokenizer.control_tokens])
    expected = [encoding.ids for encoding in library.encode_batch_fast(texts, add_special_tokens=False)]
    for piece_chars in (1 << 13, 3):
        monkeypatch.setattr("octavo.text.tokenizer.PIECE_CHARS", piece_chars)
        for text, ids in zip(texts, expected, strict=True):
            assert tokenizer.encode(text, parse_special=True, add_bos=False) == ids, ascii(text)
    if name in ("llama-bpe", "refact", "gemma-4"):
        for text, ids in zip(texts, expected, strict=True):
            assert tokenizer_of(name).encode(text, parse_special=True, add_bos=False) == ids, ascii(text)
