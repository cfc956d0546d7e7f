"""Tokens as texts, kinds and bytes, and the search for special tokens in text."""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import Literal

from octavo.core.errors import ModelFileError
from octavo.core.steps import Steps, finish

_WINDOW = 1 << 16  # characters that one search looks through
SPACE_MARK = "▁"  # how SentencePiece writes a space inside a token
Spelling = Literal["byte_level", "sentencepiece"]
# Characters of which some stand for others while a chat is rendered (chat_template.py), as inside of a class of a
# regular expression: Braille patterns and hexagrams, which print as they are and are neither letters nor spaces, and
# where these are used up, private-use characters.
DISGUISES = "\u2801-\u28ff\u4dc0-\u4dff\ue000-\uf8ff"
CIRCLED_LETTERS = (("Ⓐ", "ⓩ"), ("🄰", "🅉"), ("🅐", "🅩"), ("🅰", "🆉"))  # and squared ones
# Unicode's White_Space, which tokenizers go by. Python's own idea of it has U+001C to U+001F too.
WHITE_SPACE = "".join(c for c in map(chr, range(0x3001)) if c.isspace() and not "\x1c" <= c <= "\x1f")


class TokenKind(IntEnum):
    """The values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3  # never made from user text: begins and ends turns
    USER_DEFINED = 4  # found in any text before the algorithm runs
    UNUSED = 5
    BYTE = 6  # "<0x41>" stands for one byte


# What text may never produce: control tokens, and the token for what is no token.
CONTROL_KINDS = frozenset({int(TokenKind.CONTROL), int(TokenKind.UNKNOWN)})


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that is found in the text as it stands. ``lstrip`` and ``rstrip`` swallow the white space beside it."""

    text: str
    token_id: int
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False  # matches only where no word character touches it


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """All tokens, by id. ``texts`` are the file's own spelling, ``token_bytes`` what each token stands for in text."""

    texts: Sequence[str]
    kinds: Sequence[int]
    token_bytes: Sequence[bytes]

    @classmethod
    def build(cls, texts: Sequence[str], kinds: Sequence[int], spelling: Spelling) -> Vocabulary:
        """Spell every token out in bytes. Raises ``ModelFileError`` if a byte token's name is none."""
        spell = _spell_byte_level if spelling == "byte_level" else _spell_sentencepiece
        token_bytes = spell(texts)
        for token_id in not_normal(kinds):
            kind, text = kinds[token_id], texts[token_id]
            if kind == TokenKind.BYTE:
                token_bytes[token_id] = bytes([_byte_value(text)])
            elif spelling == "byte_level" or kind in CONTROL_KINDS:
                token_bytes[token_id] = text.encode()
        return cls(texts, kinds, token_bytes)

    def max_bytes(self, hidden: Container[int], spelling: Spelling) -> int | None:
        """The most bytes of text that one token stands for; None if some byte is no token, so that text may vanish.

        hidden: tokens that text cannot become
        """
        if spelling == "byte_level":
            usable = {self.texts[i] for i, raw in enumerate(self.token_bytes) if len(raw) == 1 and i not in hidden}
            covers_all = usable.issuperset(BYTE_LEVEL_ALPHABET)
        else:
            covers_all = sum(kind == TokenKind.BYTE for kind in self.kinds) == 256
        return max(map(len, self.token_bytes)) if covers_all else None


def not_normal(kinds: Sequence[int]) -> list[int]:
    """Ids of the tokens that are not ``NORMAL``: few, so what is done per token is done for these alone."""
    return [token_id for token_id, kind in enumerate(kinds) if kind != 1]


def check_distinct(texts: Sequence[str]) -> None:
    """Raise ``ModelFileError`` naming the first text that two ids share."""
    if len(set(texts)) == len(texts):
        return
    seen: dict[str, int] = {}
    for token_id, text in enumerate(texts):
        if (first := seen.setdefault(text, token_id)) != token_id:
            raise ModelFileError(f"tokens {first} and {token_id} of the vocabulary are both {text!r:.80}")


def _byte_value(text: str) -> int:
    match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)
    if match is None:
        raise ModelFileError(f"byte token {text!r:.80} is not of the form <0x41>")
    return int(match[1], 16)


def _byte_level_alphabet() -> str:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's ``bytes_to_unicode``).

    Printable Latin-1 stands for itself; the 68 other bytes take U+0100, U+0101, ... in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


BYTE_LEVEL_ALPHABET = _byte_level_alphabet()
_BYTE_OF_CHAR = {char: byte for byte, char in enumerate(BYTE_LEVEL_ALPHABET)}
_BYTE_LEVEL_MAP = codecs.charmap_build(BYTE_LEVEL_ALPHABET)


def _spell_byte_level(texts: Sequence[str]) -> list[bytes]:
    try:
        # One C call for the whole vocabulary; every character becomes one byte, so lengths tell the tokens apart.
        joined = codecs.charmap_encode("".join(texts), "strict", _BYTE_LEVEL_MAP)[0]
    except UnicodeEncodeError:
        return [
            b"".join(
                bytes([_BYTE_OF_CHAR[char]]) if char in _BYTE_OF_CHAR else char.encode("utf-8", "replace")
                for char in text
            )
            for text in texts
        ]
    ends = list(accumulate(map(len, texts)))
    return list(map(joined.__getitem__, map(slice, [0, *ends], ends)))


def _spell_sentencepiece(texts: Sequence[str]) -> list[bytes]:
    return [text.replace(SPACE_MARK, " ").encode() for text in texts]


class SpecialTokenMatcher:
    """Finds special tokens in text: leftmost first, of those the longest. Time linear in the text."""

    _HEAD = 4  # characters of a token that the scanning expression looks at; the rest is one dictionary look-up

    def __init__(self, tokens: Iterable[SpecialToken]) -> None:
        self._tokens = {token.text: token for token in tokens if token.text}
        heads = sorted({text[: self._HEAD] for text in self._tokens}, key=len)
        self._scan = re.compile("|".join(map(re.escape, heads))) if heads else None
        lengths: dict[str, set[int]] = {}
        for text in self._tokens:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}

    def match(self, text: str, at: int) -> SpecialToken | None:
        """The longest special token that begins at ``text[at]``."""
        for length in self._lengths.get(text[at], ()):
            token = self._tokens.get(text[at : at + length])
            if token is not None and not (token.single_word and _touches_word(text, at, at + length)):
                return token
        return None

    def split(self, text: str) -> list[str | int]:
        """``text`` as plain pieces (never empty) and the ids of the special tokens between them."""
        pieces: list[str | int] = []
        finish(self.split_steps(text, pieces))
        return pieces

    def split_steps(self, text: str, pieces: list[str | int]) -> Steps[None]:
        """``split`` into ``pieces``; who drives it may stop where these become too many."""
        start = position = num_found = 0
        while self._scan is not None and position < len(text):
            stop = position + _WINDOW
            found = self._scan.search(text, position, stop + self._HEAD - 1)
            if found is None:
                position = stop
                yield
                continue
            num_found += 1
            if num_found % 256 == 0:
                yield
            at = found.start()
            token = self.match(text, at)
            if token is None:
                position = at + 1
                continue
            plain = text[start:at].rstrip(WHITE_SPACE) if token.lstrip else text[start:at]
            if plain:
                pieces.append(plain)
            pieces.append(token.token_id)
            start = at + len(token.text)
            while token.rstrip and start < len(text) and text[start] in WHITE_SPACE:
                start += 1
            position = start
        if start < len(text):
            pieces.append(text[start:])


def _touches_word(text: str, start: int, end: int) -> bool:
    return is_word_character(text[start - 1 : start]) or is_word_character(text[end : end + 1])


def is_word_character(character: str) -> bool:
    """Word characters of Unicode's regular expressions (UTS #18, annex C): alphabetic, marks, decimal digits,
    connectors and joiners. Python's ``\\w`` lacks marks and joiners, and has other numbers too. Characters newer than
    this Python's Unicode are none; nor is "".
    """
    if not character:
        return False
    kind = unicodedata.category(character)
    if kind == "So":  # alphabetic by exception
        return any(first <= character <= last for first, last in CIRCLED_LETTERS)
    return kind[0] in "LM" or kind in ("Nd", "Nl", "Pc") or character in "\u200c\u200d"
