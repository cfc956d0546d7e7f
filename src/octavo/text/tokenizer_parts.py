"""What a tokenizer is made of, whichever file it came from, and checked access to that file's values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from octavo.core.errors import ModelFileError
from octavo.core.steps import Steps
from octavo.text.vocabulary import SpecialToken, TokenKind, Vocabulary

T = TypeVar("T")

LOOKS_LIKE_CONTROL = re.compile(r"[<\[].+[>\]\[]", re.DOTALL)


class PlainEncoder(Protocol):
    """Text without special tokens to ids. Safe to call from several threads."""

    max_run: int | None  # characters of a server's text that it takes without a place to cut; None: any number

    def encode_steps(self, texts: Sequence[str], *, at_start: bool, goes_on: bool = False) -> Steps[list[list[int]]]:
        """Ids of each text, in order. They stand between special tokens; ``at_start``: the first has none before it.

        goes_on: instead, the one text goes on from the one before, which ended where ``cut`` said
        """

    def cut(self, text: str, start: int, size: int) -> int:
        """A place after ``start``, about ``size`` on, where ``text`` may be cut: the ids of what is before and after
        are those of the whole, one after the other. The end of ``text`` where there is none.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """Everything that ``Tokenizer`` needs."""

    vocabulary: Vocabulary
    special: Sequence[SpecialToken]  # control and user-defined
    encoder: PlainEncoder
    bos_token_id: int | None
    eos_token_id: int | None
    eos_token_ids: frozenset[int]
    add_bos: bool
    max_token_bytes: int | None  # of text, that one token may stand for; None: there is no limit
    adds_space_prefix: bool
    chat_template: str | None


def mark_as_control(texts: Sequence[str], kinds: list[int], token_ids: set[int]) -> None:
    """Make tokens that begin or end turns control tokens, even where the file forgot to say so.

    Only those that look like one: some base models end a text with an ordinary token, which text may contain.
    """
    for token_id in token_ids:
        if kinds[token_id] in (TokenKind.NORMAL, TokenKind.USER_DEFINED) and LOOKS_LIKE_CONTROL.fullmatch(
            texts[token_id]
        ):
            kinds[token_id] = TokenKind.CONTROL


class Fields:
    """Typed look-ups in an untrusted mapping; a wrong type is a ``ModelFileError`` that names key and file."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def get(self, key: str, kind: type[T]) -> T | None:
        """The value, or None where it is absent or null."""
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, tuple):  # arrays of the GGUF reader
            value = list(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelFileError(f"{key} in {self._where} is {value!r:.80} but must be of type {kind.__name__}")
        return value

    def require(self, key: str, kind: type[T]) -> T:
        """The value; absent is an error too."""
        value = self.get(key, kind)
        if value is None:
            raise ModelFileError(f"{self._where} has no {key}")
        return value

    def get_list(self, key: str, kind: type[T]) -> list[T] | None:
        """A list (or tuple) whose items all have exactly this type, or None where it is absent."""
        values: Any = self._values.get(key)
        if values is None:
            return None
        if not isinstance(values, list | tuple):
            raise ModelFileError(f"{key} in {self._where} is {values!r:.80} but must be a list")
        if others := set(map(type, values)) - {kind}:
            names = ", ".join(sorted(other.__name__ for other in others))
            raise ModelFileError(f"{key} in {self._where} holds items of type {names} but all must be {kind.__name__}")
        return list(values)

    def require_list(self, key: str, kind: type[T]) -> list[T]:
        """Such a list; absent is an error too."""
        values = self.get_list(key, kind)
        if values is None:
            raise ModelFileError(f"{self._where} has no {key}")
        return values

    def token_id(self, key: str, vocab_size: int) -> int | None:
        """A token id within the vocabulary, or None where it is absent."""
        value = self.get(key, int)
        return None if value is None else check_token_id(value, vocab_size, f"{key} in {self._where}")


def check_token_id(value: int, vocab_size: int, what: str) -> int:
    """``value`` if it is a token id, else ``ModelFileError``."""
    if not 0 <= value < vocab_size:
        raise ModelFileError(f"{what} is {value} but the vocabulary has {vocab_size} tokens")
    return value
