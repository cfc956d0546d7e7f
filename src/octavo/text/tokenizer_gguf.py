"""The tokenizer that a GGUF file carries in its metadata."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.core.errors import ModelFileError
from octavo.text.byte_pair import build_byte_pair
from octavo.text.pre_tokenizers import Cut, find_cut
from octavo.text.sentencepiece import SentencePieceEncoder
from octavo.text.tokenizer_parts import Fields, PlainEncoder, TokenizerParts, mark_as_control
from octavo.text.turn_ends import ends_by_name, ends_by_template
from octavo.text.vocabulary import (
    CONTROL_KINDS,
    SpecialToken,
    Spelling,
    TokenKind,
    Vocabulary,
    check_distinct,
    not_normal,
)

_PREFIX = "tokenizer.ggml."
_MODELS = ("gpt2", "llama", "gemma4")
_NOT_DECODERS = {
    "bert": "WordPiece, of encoders",
    "t5": "unigram SentencePiece, of encoder-decoders",
    "rwkv": "RWKV's own",
    "plamo2": "PLaMo's own",
    "no_vocab": "no vocabulary at all",
    "none": "no vocabulary at all",
}
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")


def read_gguf_tokenizer(metadata: Mapping[str, object]) -> TokenizerParts:
    """Build the parts from ``tokenizer.*`` keys. Raises ``ModelFileError`` for what is missing, wrong or unknown."""
    fields = Fields(metadata, "the GGUF metadata")
    model = fields.require(_PREFIX + "model", str)
    if model not in _MODELS:
        kind = f" ({_NOT_DECODERS[model]})" if model in _NOT_DECODERS else ""
        raise ModelFileError(
            f"{_PREFIX}model is {model!r:.80}{kind}, which octavo does not have; it has {', '.join(_MODELS)}"
        )
    texts = fields.require_list(_PREFIX + "tokens", str)
    if not texts:
        raise ModelFileError(f"{_PREFIX}tokens is empty")
    check_distinct(texts)
    kinds = _read_kinds(fields, len(texts))
    bos, eos, eot, eom = (
        fields.token_id(f"{_PREFIX}{name}_token_id", len(texts)) for name in ("bos", "eos", "eot", "eom")
    )
    template = fields.get("tokenizer.chat_template", str)
    ends = {token_id for token_id in (eos, eot, eom) if token_id is not None}
    ends |= ends_by_name(texts, kinds) | ends_by_template(template, texts, kinds, bos=bos, eos=eos)
    mark_as_control(texts, kinds, ends | ({bos} if bos is not None else set()))
    special = [i for i in not_normal(kinds) if kinds[i] in CONTROL_KINDS or kinds[i] == TokenKind.USER_DEFINED]
    hidden = {i for i in special if kinds[i] in CONTROL_KINDS}

    cut = None if model == "llama" else find_cut(model if model == "gemma4" else _pre(fields))
    spelling: Spelling = "byte_level" if cut is not None and not cut.raw else "sentencepiece"
    vocabulary = Vocabulary.build(texts, kinds, spelling)
    add_space = cut is None and fields.get(_PREFIX + "add_space_prefix", bool) is not False
    encoder: PlainEncoder
    if cut is None:
        encoder = _sentencepiece(fields, texts, kinds, add_space)
    else:
        encoder = _byte_pair(fields, texts, hidden, cut)
    strips = _strips_after_special(fields)
    return TokenizerParts(
        vocabulary=vocabulary,
        special=[SpecialToken(texts[i], i, rstrip=strips and texts[i] not in _NOT_STRIPPED) for i in special],
        encoder=encoder,
        bos_token_id=bos,
        eos_token_id=eos,
        eos_token_ids=frozenset(ends),
        max_token_bytes=vocabulary.max_bytes(hidden, spelling),
        add_bos=bos is not None and _adds_bos(fields, cut),
        adds_space_prefix=add_space,
        chat_template=template,
    )


def _pre(fields: Fields) -> str:
    return fields.get(_PREFIX + "pre", str) or "default"


def _adds_bos(fields: Fields, cut: Cut | None) -> bool:
    """As the file says, else as the family does. Files of raw vocabularies with a BOS of their own (Gemma 4) say no by
    mistake (llama.cpp #21500).

    An EOS that the file wants behind each text (``add_eos_token``) is not for prompts, which are to be gone on from.
    """
    said = fields.get(_PREFIX + "add_bos_token", bool)
    if cut is not None and cut.raw and cut.add_bos:
        return True
    return said if said is not None else cut is None or cut.add_bos


def _strips_after_special(fields: Fields) -> bool:
    """Whether special tokens swallow the white space behind them: Phi-3's do, which no key of a GGUF file says."""
    name = (fields.get("general.name", str) or "").lower()
    return "phi-3" in name or "phi3" in name


def _read_kinds(fields: Fields, vocab_size: int) -> list[int]:
    kinds = fields.get_list(_PREFIX + "token_type", int)
    if kinds is None:
        return [int(TokenKind.NORMAL)] * vocab_size
    if len(kinds) != vocab_size:
        raise ModelFileError(f"{_PREFIX}token_type has {len(kinds)} items for {vocab_size} tokens")
    if strange := set(kinds) - set(TokenKind):
        raise ModelFileError(f"{_PREFIX}token_type holds {min(strange)}, which is no kind of token (1 to 6)")
    return kinds


def _byte_pair(fields: Fields, texts: list[str], hidden: set[int], cut: Cut) -> PlainEncoder:
    vocab = dict(zip(texts, range(len(texts)), strict=True))
    for token_id in hidden:
        del vocab[texts[token_id]]
    hidden_texts = frozenset(texts[token_id] for token_id in hidden)
    return build_byte_pair(vocab, fields.require_list(_PREFIX + "merges", str), hidden_texts, cut)


def _sentencepiece(fields: Fields, texts: list[str], kinds: list[int], add_space: bool) -> PlainEncoder:
    scores = fields.require_list(_PREFIX + "scores", float)
    if len(scores) != len(texts):
        raise ModelFileError(f"{_PREFIX}scores has {len(scores)} items for {len(texts)} tokens")
    if any(score != score for score in scores):
        raise ModelFileError(f"{_PREFIX}scores holds a NaN")
    pieces = {
        text: (i, scores[i])
        for i, text in enumerate(texts)
        if kinds[i] in (TokenKind.NORMAL, TokenKind.USER_DEFINED, TokenKind.UNUSED) and text
    }
    of_byte = {texts[i].lower(): i for i, kind in enumerate(kinds) if kind == TokenKind.BYTE}
    byte_ids = [of_byte[name] for byte in range(256) if (name := f"<0x{byte:02x}>") in of_byte]
    if len(byte_ids) not in (0, 256):
        raise ModelFileError(f"the vocabulary has {len(byte_ids)} byte tokens but must have all 256 or none")
    unknown = fields.token_id(_PREFIX + "unknown_token_id", len(texts))
    return SentencePieceEncoder(pieces, byte_ids, unknown, add_space=add_space)
