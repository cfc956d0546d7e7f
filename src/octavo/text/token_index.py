"""Which tokens contain a text."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.core.steps import Steps

_PER_STEP = 1 << 12


class TokenTable(Protocol):
    """What of a tokenizer is looked at."""

    @property
    def vocab_size(self) -> int: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def is_control(self, token_id: int, /) -> bool: ...


class TokenIndex:
    """The bytes of all tokens but control tokens, end to end.

    data:   uint8 [bytes]
    starts: int32 [tokens], where each token begins in ``data``
    """

    def __init__(self, texts: list[bytes]) -> None:
        self.data: NDArray[np.uint8] = np.frombuffer(b"".join(texts), np.uint8)
        lengths = np.fromiter(map(len, texts), np.int32, len(texts))
        self.starts: NDArray[np.int32] = np.cumsum(lengths, dtype=np.int32) - lengths
        self._ends = self.starts + lengths
        self._counts = np.bincount(self.data, minlength=256)

    @classmethod
    def build(cls, tokenizer: TokenTable) -> Steps[TokenIndex]:
        """In pieces: some 20 ms for a large vocabulary."""
        texts: list[bytes] = []
        for token_id in range(tokenizer.vocab_size):
            texts.append(b"" if tokenizer.is_control(token_id) else tokenizer.token_bytes(token_id))
            if token_id % _PER_STEP == 0:
                yield
        return cls(texts)

    def containing(self, wanted: bytes) -> NDArray[np.int64]:
        """The tokens that ``wanted``, which is not empty, is a part of; ascending. A few passes over ``data`` in C."""
        pattern = np.frombuffer(wanted, np.uint8)
        rarest = min(range(len(pattern)), key=lambda at: int(self._counts[pattern[at]]))
        at = np.flatnonzero(self.data == pattern[rarest]) - rarest
        at = at[(at >= 0) & (at <= len(self.data) - len(pattern))]
        for offset in range(len(pattern)):
            at = at[self.data[at + offset] == pattern[offset]]
        token = np.searchsorted(self.starts, at, side="right") - 1
        token = token[at + len(pattern) <= self._ends[token]]
        return token[np.diff(token, prepend=-1) > 0]
