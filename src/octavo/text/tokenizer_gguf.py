"""The tokenizer that a GGUF file carries in its metadata."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.core.errors import ModelFileError
from octavo.text.byte_pair import build_byte_level
from octavo.text.pre_tokenizers import PRE_TOKENIZERS
from octavo.text.sentencepiece import SentencePieceEncoder
from octavo.text.tokenizer_parts import (
    END_NAMES,
    Fields,
    PlainEncoder,
    TokenizerParts,
    mark_as_control,
)
from octavo.text.vocabulary import CONTROL_KINDS, SpecialToken, TokenKind, Vocabulary, check_distinct, not_normal

_PREFIX = "tokenizer.ggml."


def read_gguf_tokenizer(metadata: Mapping[str, object]) -> TokenizerParts:
    """Build the parts from ``tokenizer.*`` keys. Raises ``ModelFileError`` for what is missing, wrong or unknown."""
    fields = Fields(metadata, "the GGUF metadata")
    model = fields.require(_PREFIX + "model", str)
    if model not in ("gpt2", "llama"):
        raise ModelFileError(f"{_PREFIX}model is {model!r:.80}, which octavo does not have; it has gpt2, llama")
    texts = fields.require_list(_PREFIX + "tokens", str)
    if not texts:
        raise ModelFileError(f"{_PREFIX}tokens is empty")
    check_distinct(texts)
    kinds = _read_kinds(fields, len(texts))
    bos, eos, eot, eom = (
        fields.token_id(f"{_PREFIX}{name}_token_id", len(texts)) for name in ("bos", "eos", "eot", "eom")
    )
    ends = {token_id for token_id in (eos, eot, eom) if token_id is not None}
    mark_as_control(texts, kinds, ends | ({bos} if bos is not None else set()))
    special = [i for i in not_normal(kinds) if kinds[i] in CONTROL_KINDS or kinds[i] == TokenKind.USER_DEFINED]
    hidden = {i for i in special if kinds[i] in CONTROL_KINDS}
    ends.update(i for i in hidden if texts[i] in END_NAMES)

    pre = fields.get(_PREFIX + "pre", str) or "default"
    add_space = model == "llama" and fields.get(_PREFIX + "add_space_prefix", bool) is not False
    add_bos = fields.get(_PREFIX + "add_bos_token", bool)
    if add_bos is None:
        add_bos = model == "llama" or (pre in PRE_TOKENIZERS and PRE_TOKENIZERS[pre].add_bos)
    vocabulary = Vocabulary.build(texts, kinds, "byte_level" if model == "gpt2" else "sentencepiece")
    encoder: PlainEncoder
    if model == "gpt2":
        encoder = _byte_level(fields, texts, hidden, pre)
    else:
        encoder = _sentencepiece(fields, texts, kinds, add_space)
    return TokenizerParts(
        vocabulary=vocabulary,
        special=[SpecialToken(texts[i], i) for i in special],
        encoder=encoder,
        bos_token_id=bos,
        eos_token_id=eos,
        eos_token_ids=frozenset(ends),
        max_token_bytes=vocabulary.max_bytes(hidden, "byte_level" if model == "gpt2" else "sentencepiece"),
        add_bos=add_bos and bos is not None,
        adds_space_prefix=add_space,
        chat_template=fields.get("tokenizer.chat_template", str),
    )


def _read_kinds(fields: Fields, vocab_size: int) -> list[int]:
    kinds = fields.get_list(_PREFIX + "token_type", int)
    if kinds is None:
        return [int(TokenKind.NORMAL)] * vocab_size
    if len(kinds) != vocab_size:
        raise ModelFileError(f"{_PREFIX}token_type has {len(kinds)} items for {vocab_size} tokens")
    if strange := set(kinds) - set(TokenKind):
        raise ModelFileError(f"{_PREFIX}token_type holds {min(strange)}, which is no kind of token (1 to 6)")
    return kinds


def _byte_level(fields: Fields, texts: list[str], hidden: set[int], pre: str) -> PlainEncoder:
    vocab = dict(zip(texts, range(len(texts)), strict=True))
    for token_id in hidden:
        del vocab[texts[token_id]]
    hidden_texts = frozenset(texts[token_id] for token_id in hidden)
    return build_byte_level(vocab, fields.require_list(_PREFIX + "merges", str), hidden_texts, pre)


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
