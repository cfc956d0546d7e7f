"""Grammars small enough to check by hand: an automaton over bytes, and matchers that misbehave."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Numbers:
    """[12,3,45]: a list of numbers without white space."""

    #: state -> characters -> next state; 4 is the end
    STATES: ClassVar[dict[int, dict[str, int]]] = {
        0: {"[": 1},
        1: {"123456789": 2},
        2: {"0123456789": 2, ",": 1, "]": 4},
        4: {},
    }
    WHOLE: ClassVar[re.Pattern[bytes]] = re.compile(rb"\[[1-9][0-9]*(,[1-9][0-9]*)*\]")


class NumbersMatcher:
    """Follows ``Numbers``; remembers every call, and fails the test on one that no matcher should get."""

    made: ClassVar[list[NumbersMatcher]] = []

    def __init__(self, grammar: Numbers, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.bytes_by_id, self.vocab_size = tokenizer.bytes_by_id, vocab_size
        self.steps = {
            s: {ord(c): to for chars, to in arcs.items() for c in chars} for s, arcs in grammar.STATES.items()
        }
        self.states, self.accepted, self.rolled_back = [0], list[int](), 0
        NumbersMatcher.made.append(self)

    def walk(self, state: int, token_id: int) -> int | None:
        text = self.bytes_by_id[token_id] if token_id < len(self.bytes_by_id) else b""
        for byte in text:
            if (state := self.steps[state].get(byte, -1)) < 0:
                return None
        return state if text else None

    @property
    def has_ended(self) -> bool:
        return self.states[-1] == 4

    def allowed(self) -> bytes:
        words = -(-self.vocab_size // 32)
        may = [self.walk(self.states[-1], token) is not None for token in range(self.vocab_size)]
        return np.packbits(may + [False] * (32 * words - len(may)), bitorder="little").tobytes()

    def accept(self, token_id: int) -> None:
        state = self.walk(self.states[-1], token_id)
        if state is None:
            raise ValueError(f"token {token_id} cannot come after {self.accepted}")
        self.states.append(state)
        self.accepted.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        assert 0 < num_tokens <= len(self.accepted)
        del self.states[-num_tokens:], self.accepted[-num_tokens:]
        self.rolled_back += num_tokens


@dataclass(frozen=True)
class Broken:
    """Allows all, until it misbehaves in the draw after ``after`` tokens."""

    how: str  # "raise" in allowed(), "refuse" in accept(), "nothing" or "short" masks
    after: int = 3


@dataclass
class BrokenMatcher:
    grammar: Broken
    tokenizer: Tokenizer
    vocab_size: int
    count: int = 0
    has_ended: bool = field(default=False, init=False)

    def allowed(self) -> bytes:
        words = -(-self.vocab_size // 32)
        if self.count < self.grammar.after or self.grammar.how == "refuse":
            return b"\xff" * (4 * words)
        if self.grammar.how == "raise":
            raise KeyError("a rule is missing")
        return b"\0" * (4 * words) if self.grammar.how == "nothing" else b"\xff" * 4

    def accept(self, token_id: int) -> None:
        self.count += 1
        if self.grammar.how == "refuse" and self.count > self.grammar.after:
            raise ValueError("not that one")

    def rollback(self, num_tokens: int) -> None:
        self.count -= num_tokens


MAKERS = {Numbers: NumbersMatcher, Broken: BrokenMatcher}


class Teacher:
    """Drafts what each choice is going to draw, or something else from some place on."""

    def __init__(self, truths: dict[int, list[int]], right: Iterable[int], others: int = 288) -> None:
        """right: for each proposal in turn, how many of its tokens are right."""
        self.truths, self.right, self.others, self.proposed = truths, list(right), others, 0

    def propose(self, seq: object, most: int) -> list[int]:
        truth = self.truths[seq.request.choice_index][seq.num_output :]  # type: ignore[attr-defined]
        right = self.right[self.proposed % len(self.right)]
        self.proposed += 1
        wrong = [(token + 1 + self.proposed) % self.others for token in (truth[right:] or [7, 8, 9])]
        return [*truth[:right], *wrong]
