"""Tokens to text as they come."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

_new_decoder = codecs.getincrementaldecoder("utf-8")


class TokenBytes(Protocol):
    """The part of a tokenizer that turning tokens back into text needs."""

    @property
    def bytes_by_id(self) -> Sequence[bytes]:
        """Token id -> the bytes that it stands for; of a control token, those of its name."""

    @property
    def visible_bytes_by_id(self) -> Sequence[bytes]:
        """The same, without control tokens."""

    @property
    def adds_space_prefix(self) -> bool:
        """Whether a text is encoded with a space before it."""


class Detokenizer:
    """Incremental UTF-8 over the bytes of tokens. One per sequence.

    ``"".join(pushes) + flush()`` equals the tokens' joined bytes decoded at once with "replace", whatever the tokens:
    a character that is still incomplete is held back, one that never completes becomes U+FFFD.

    skip_special:      control tokens give no text
    drop_space_prefix: the tokens are a whole text, so the space that a SentencePiece tokenizer put before it goes.
                       Leave it off for tokens that continue a prompt: there the space is part of the text.

    ``num_chars`` is the number of characters released so far. A character counts for the token that completed it.
    ``pending`` says whether the bytes so far end inside a character, which is held back.
    """

    __slots__ = ("_bytes_by_id", "_decode", "_decoder", "_drop_space", "num_chars", "pending")

    def __init__(self, tokenizer: TokenBytes, *, skip_special: bool = True, drop_space_prefix: bool = False) -> None:
        self._decoder = _new_decoder("replace")
        self._decode = self._decoder.decode
        self._bytes_by_id = tokenizer.visible_bytes_by_id if skip_special else tokenizer.bytes_by_id
        self._drop_space = drop_space_prefix and tokenizer.adds_space_prefix
        self.num_chars = 0
        self.pending = False

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; may be empty."""
        try:
            data = self._bytes_by_id[token_id]
        except IndexError:  # a padding row of the embedding: no text
            return ""
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
        if not self.pending and data.isascii():  # most tokens: no character is cut by either end
            text = data.decode("ascii")
        else:
            text = self._decode(data)
            self.pending = self._decoder.getstate()[0] != b""
        self.num_chars += len(text)
        return text

    def flush(self) -> str:
        """The end of the sequence: U+FFFD for a character that never completed, else nothing."""
        text = self._decode(b"", True)
        self.pending = False
        self.num_chars += len(text)
        return text
