"""Grammars: what an answer may be, told token by token by a matcher. Here is what the engine asks of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from octavo.core.errors import InvalidRequest
from octavo.text.tokenizer import Tokenizer


class Matcher(Protocol):
    """Follows one answer token by token. One thread at a time calls it. What it raises ends its request alone."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing may follow but a token that ends the answer."""
        ...

    def allowed(self) -> bytes | bytearray | memoryview:
        """The tokens that may come next, also those that may end the answer here: bit t % 32 of word t // 32.

        As many little-endian words of 32 bits as the model's vocabulary takes.
        """
        ...

    def accept(self, token_id: int) -> None:
        """This token has come."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """The last ``num_tokens`` that were accepted have not come after all."""
        ...


#: Makes a matcher of a grammar, for a tokenizer and the number of tokens that the model draws from.
MatcherMaker = Callable[[Any, Tokenizer, int], Matcher]
#: By the type of the grammar.
MAKERS: dict[type, MatcherMaker] = {}


def maker_of(grammar: object) -> MatcherMaker:
    """Raises InvalidRequest if nobody makes matchers of such a grammar."""
    maker = MAKERS.get(type(grammar))
    if maker is None:
        have = ", ".join(kind.__name__ for kind in MAKERS) or "none"
        raise InvalidRequest(
            f"grammar is a {type(grammar).__name__} but there are matchers of {have} here", param="grammar"
        )
    return maker
