"""The tokenizer of a Hugging Face model folder."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from octavo.core.errors import ModelFileError
from octavo.text.byte_pair import LibraryEncoder, load_pipeline
from octavo.text.pre_tokenizers import PATTERNS, SEAM, SEAMS, WORD_PATTERNS
from octavo.text.space_marks import SpaceMarks, find_space_marks
from octavo.text.tokenizer_parts import Fields, TokenizerParts, check_token_id, mark_as_control
from octavo.text.turn_ends import ends_by_template
from octavo.text.vocabulary import (
    CONTROL_KINDS,
    SPACE_MARK,
    SpecialToken,
    Spelling,
    TokenKind,
    Vocabulary,
    check_distinct,
)

_MAX_FILE_BYTES = 256 << 20  # Gemma's tokenizer.json has 33 MB
_MAX_VOCAB = 1 << 22


def read_folder_tokenizer(folder: Path) -> TokenizerParts:
    """Build the parts from ``tokenizer.json`` and the files beside it.

    Read are tokenizer.json (required), tokenizer_config.json, special_tokens_map.json, generation_config.json,
    config.json (for its ends, where the one before names none) and chat_template.jinja. Raises ``ModelFileError`` for
    what is missing, wrong or unknown.
    """
    if not (folder / "tokenizer.json").is_file():
        raise ModelFileError(f"{folder} has no tokenizer.json; octavo does not read tokenizer.model or vocab.json")
    spec = _read_json(folder / "tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json")
    model = Fields(spec, "tokenizer.json").require("model", dict)
    if model.get("type", "BPE") not in ("BPE", "Unigram"):
        raise ModelFileError(f"tokenizer.json has a {model['type']!r:.80} model; octavo has BPE, Unigram")

    texts, added = _read_vocabulary(model, spec)
    check_distinct(texts)
    kinds = _kinds(texts, model, added)
    names = {**_read_json(folder / "special_tokens_map.json"), **config}
    id_of = {text: token_id for token_id, text in enumerate(texts)}
    bos, eos = (_named_token(names, name, id_of) for name in ("bos_token", "eos_token"))
    template = _chat_template(folder, config)
    ends = _config_ends(folder, len(texts)) | ({eos} if eos is not None else set())
    ends |= ends_by_template(template, texts, kinds, bos=bos, eos=eos)
    mark_as_control(texts, kinds, ends | ({bos} if bos is not None else set()))
    spelling = _spelling(spec)
    vocabulary = Vocabulary.build(texts, kinds, spelling)
    hidden = {i for i in range(len(texts)) if kinds[i] in CONTROL_KINDS}
    add_bos = Fields(config, "tokenizer_config.json").get("add_bos_token", bool)
    return TokenizerParts(
        vocabulary=vocabulary,
        special=[
            SpecialToken(
                texts[i],
                i,
                bool(entry.get("lstrip")),
                bool(entry.get("rstrip")),
                bool(entry.get("single_word")),
            )
            for i, entry in added.items()
        ],
        encoder=_build_encoder(spec, model, {texts[i] for i in added if kinds[i] in CONTROL_KINDS}),
        bos_token_id=bos,
        eos_token_id=eos,
        eos_token_ids=frozenset(ends),
        max_token_bytes=_max_token_bytes(spec, vocabulary.max_bytes(hidden, spelling)),
        add_bos=bos is not None
        and (add_bos if add_bos is not None else _begins_with(spec.get("post_processor"), texts[bos])),
        adds_space_prefix=spelling == "sentencepiece" and _adds_space_prefix(spec),
        chat_template=template,
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The object in the file; {} where there is no file."""
    if not path.is_file():
        return {}
    if (size := path.stat().st_size) > _MAX_FILE_BYTES:
        raise ModelFileError(f"{path.name} has {size} bytes; the limit is {_MAX_FILE_BYTES}")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path.name} holds no JSON object")
    return value


def _read_vocabulary(model: dict[str, Any], spec: dict[str, Any]) -> tuple[list[str], dict[int, dict[str, Any]]]:
    """All texts by id, holes filled with unique names, and the added tokens by id."""
    added: dict[int, dict[str, Any]] = {}
    text_of: dict[int, str] = {}
    for text, token_id in _model_tokens(model):
        if type(token_id) is not int or not 0 <= token_id < _MAX_VOCAB or token_id in text_of:
            raise ModelFileError(
                f"tokenizer.json gives token {text!r:.80} the id {token_id!r:.80}, which is taken or no id"
            )
        text_of[token_id] = text
    for entry in Fields(spec, "tokenizer.json").get("added_tokens", list) or []:
        if not isinstance(entry, dict):
            raise ModelFileError(f"an added token in tokenizer.json is {entry!r:.80}, not an object")
        fields = Fields(entry, "an added token of tokenizer.json")
        token_id, text = (
            check_token_id(fields.require("id", int), _MAX_VOCAB, "an added token's id"),
            fields.require("content", str),
        )
        if text_of.setdefault(token_id, text) != text:
            raise ModelFileError(
                f"tokenizer.json gives id {token_id} to both {text_of[token_id]!r:.80} and {text!r:.80}"
            )
        added[token_id] = entry
    if not text_of:
        raise ModelFileError("tokenizer.json has an empty vocabulary")
    return [text_of.get(i, f"<|no token {i}|>") for i in range(max(text_of) + 1)], added


def _model_tokens(model: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Text and id of each token: an object of them, or for Unigram a list of texts with scores."""
    if model.get("type") != "Unigram":
        vocab: dict[str, Any] = Fields(model, "tokenizer.json").require("vocab", dict)
        yield from vocab.items()
        return
    for token_id, entry in enumerate(Fields(model, "tokenizer.json").require("vocab", list)):
        if not isinstance(entry, list) or [type(value) for value in entry] not in ([str, float], [str, int]):
            raise ModelFileError(f"token {token_id} of tokenizer.json is {entry!r:.80}, not a text with its score")
        yield entry[0], token_id


def _kinds(texts: list[str], model: dict[str, Any], added: Mapping[int, dict[str, Any]]) -> list[int]:
    kinds = [int(TokenKind.NORMAL)] * len(texts)
    if model.get("byte_fallback"):
        for token_id, text in enumerate(texts):
            if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                kinds[token_id] = TokenKind.BYTE
    for token_id, entry in added.items():
        kinds[token_id] = TokenKind.CONTROL if entry.get("special") else TokenKind.USER_DEFINED
    return kinds


def _named_token(names: Mapping[str, Any], name: str, id_of: Mapping[str, int]) -> int | None:
    value = names.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return None
    if not isinstance(text, str) or text not in id_of:
        raise ModelFileError(f"{name} is {text!r:.80}, which is no token of tokenizer.json")
    return id_of[text]


def _config_ends(folder: Path, vocab_size: int) -> set[int]:
    """``eos_token_id``, one or a list, of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if type(token_id) is not int:
                raise ModelFileError(f"eos_token_id in {name} holds {token_id!r:.80}, which is no token id")
            check_token_id(token_id, vocab_size, f"eos_token_id in {name}")
        return set(ids)
    return set()


def _components(part: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """A pipeline part of tokenizer.json and everything inside its sequences."""
    if not isinstance(part, dict) or depth > 8:
        return
    yield part
    for key in ("pretokenizers", "decoders", "normalizers", "processors"):
        children = part.get(key)
        for child in children if isinstance(children, list) else ():
            yield from _components(child, depth + 1)


def _spelling(spec: Mapping[str, Any]) -> Spelling:
    kinds = {part.get("type") for key in ("pre_tokenizer", "decoder") for part in _components(spec.get(key))}
    if "ByteLevel" in kinds:
        return "byte_level"
    if kinds & {"Metaspace", "ByteFallback"}:
        return "sentencepiece"
    raise ModelFileError(
        f"tokenizer.json decodes with {sorted(map(str, kinds))}; octavo has ByteLevel, Metaspace, ByteFallback"
    )


def _max_token_bytes(spec: Mapping[str, Any], most: int | None) -> int | None:
    """``most``, unless the text is changed first: composed characters are at most four times shorter (NFC)."""
    steps = list(_components(spec.get("normalizer")))
    kinds = {step.get("type") for step in steps} - {"Sequence", "Prepend"}
    replacements = [(step.get("pattern"), step.get("content")) for step in steps if step.get("type") == "Replace"]
    if all(replacement == ({"String": " "}, SPACE_MARK) for replacement in replacements):
        kinds.discard("Replace")
    removes = any(
        part.get("behavior") == "Removed" or part.get("type") in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer")
        for part in _components(spec.get("pre_tokenizer"))
    )
    if most is None or removes or kinds - {"NFC"}:
        return None
    return most * 4 if kinds else most


def _find_seam(spec: Mapping[str, Any]) -> re.Pattern[str] | None:
    """What matches before places where texts may be cut (``cut_at_seam``); None where the expressions are not known."""
    if {step.get("type") for step in _components(spec.get("normalizer"))} - {"Sequence", "NFC"}:
        return None
    cuts = 0
    patterns = []
    for part in _components(spec.get("pre_tokenizer")):
        if part.get("type") == "Split":
            pattern = part.get("pattern")
            regex = pattern.get("Regex") if isinstance(pattern, dict) else None
            if not isinstance(regex, str) or part.get("behavior") != "Isolated" or part.get("invert"):
                return None
            patterns.append(regex)
            cuts += regex in WORD_PATTERNS
        elif part.get("type") == "ByteLevel":
            if part.get("add_prefix_space", True):
                return None
            cuts += part.get("use_regex", True)
        elif part.get("type") not in ("Sequence", "Digits"):
            return None
    if cuts and PATTERNS.issuperset(patterns):
        return SEAM
    return SEAMS.get(tuple(patterns))


def _words_of(spec: Mapping[str, Any], model: Mapping[str, Any], vocab: Iterable[str]) -> SpaceMarks | None:
    """Words that merges stay within, of a pipeline that only writes spaces as U+2581, as Llama 2's and Gemma's do."""
    steps = [step for step in _components(spec.get("normalizer")) if step.get("type") != "Sequence"]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    prepend = {"type": "Prepend", "prepend": SPACE_MARK}
    splits = spec.get("pre_tokenizer")
    if splits is not None and (splits.get("type"), splits.get("pattern")) != ("Split", {"String": " "}):
        return None
    if steps not in ([spaces], [prepend, spaces]) or model.get("type", "BPE") != "BPE" or model.get("ignore_merges"):
        return None
    known = set(vocab)
    if not model.get("byte_fallback") or any(f"<0x{byte:02X}>" not in known for byte in range(256)):
        return None  # unknown characters become one token, across words
    return find_space_marks(known)


def _adds_space_prefix(spec: Mapping[str, Any]) -> bool:
    for part in (*_components(spec.get("normalizer")), *_components(spec.get("pre_tokenizer"))):
        if part.get("type") == "Prepend" and part.get("prepend") == SPACE_MARK:
            return True
        if part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never":
            return True
    return False


def _begins_with(post_processor: Any, bos: str) -> bool:
    """Whether the file's own template puts ``bos`` before a text."""
    for part in _components(post_processor):
        single = part.get("single")
        if part.get("type") == "TemplateProcessing" and isinstance(single, list) and single:
            first = single[0].get("SpecialToken") if isinstance(single[0], dict) else None
            if isinstance(first, dict) and first.get("id") == bos:
                return True
    return False


def _build_encoder(spec: dict[str, Any], model: dict[str, Any], hidden: set[str]) -> LibraryEncoder:
    """The file's own pipeline, less what would turn text into control tokens."""
    plain = {
        **spec,
        "added_tokens": [],
        "post_processor": None,
        "truncation": None,
        "padding": None,
        "model": _without(model, hidden),
    }
    pre_tokenizer = spec.get("pre_tokenizer")
    if isinstance(pre_tokenizer, dict) and pre_tokenizer.get("prepend_scheme") == "first":
        later = {**plain, "pre_tokenizer": {**pre_tokenizer, "prepend_scheme": "never"}}
        return LibraryEncoder(load_pipeline(plain), later=load_pipeline(later))
    first = load_pipeline(plain)  # before its parts are looked at: it says what is wrong with them
    words = _words_of(spec, model, (text for text, _ in _model_tokens(model) if text not in hidden))
    if words is None:
        return LibraryEncoder(first, seam=_find_seam(spec))
    split = {"type": "Split", "pattern": {"Regex": words.words}, "behavior": "Isolated", "invert": False}
    first = load_pipeline({**plain, "pre_tokenizer": split})  # the same ids, but words are cached
    if not _adds_space_prefix(spec):
        return LibraryEncoder(first, seam=words.seam)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    within = load_pipeline({**plain, "pre_tokenizer": split, "normalizer": spaces})
    return LibraryEncoder(first, within=within, seam=words.seam)


def _without(model: dict[str, Any], hidden: set[str]) -> dict[str, Any]:
    """The model without tokens that no text may become."""
    if model.get("type") == "Unigram":  # ids are places in the list: such a token gets a name that nobody can write
        secret = secrets.token_hex(16)
        vocab = [[f"{secret} {i}" if text in hidden else text, score] for i, (text, score) in enumerate(model["vocab"])]
        return {**model, "vocab": vocab}
    kept = {text: token_id for text, token_id in model["vocab"].items() if text not in hidden}
    merges = [merge for merge in model.get("merges") or () if hidden.isdisjoint(_merge_texts(merge))]
    unknown = None if model.get("unk_token") in hidden else model.get("unk_token")
    return {**model, "vocab": kept, "merges": merges, "dropout": None, "unk_token": unknown}


def _merge_texts(merge: Any) -> tuple[str, ...]:
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) for part in parts):
        raise ModelFileError(f"merge {merge!r:.80} in tokenizer.json is not two tokens")
    return parts[0], parts[1], parts[0] + parts[1]


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelFileError(f"chat_template.jinja is not UTF-8: {error}") from error
    value = config.get("chat_template")
    if isinstance(value, list):  # [{"name": "default", "template": ...}, ...]
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise ModelFileError(f"chat_template in tokenizer_config.json is {value!r:.80}, not text")
    return value
