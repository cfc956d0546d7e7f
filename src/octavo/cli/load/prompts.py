"""Prompts of a wanted number of tokens for a server whose tokenizer is not at hand.

As ids: random ones. As text: random common words, of which nearly every vocabulary holds each as one token; how many
tokens the server makes of a word, and what its template adds, is measured by asking it twice.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from octavo.cli.distributions import Lengths

PromptKind = Literal["ids", "text"]
#: Ids that are ordinary tokens in nearly every vocabulary: above the control and byte tokens, below the smallest size.
ID_RANGE = Lengths(1000, 29_999)

_COMMON = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city community name president team minute idea body information back parent face others
level office door health person art war history party result change morning reason research girl guy moment air teacher
force education
"""
#: Each one token, with the space before it, in the vocabularies of Llama, Qwen, SmolLM, Gemma and GPT.
WORDS = tuple(_COMMON.split())


@dataclass(frozen=True, slots=True)
class TextScale:
    """How a server counts texts of ``WORDS``: tokens = overhead + per_word * words."""

    per_word: float = 1.0
    overhead: float = 0.0
    is_measured: bool = False

    @classmethod
    def fit(cls, short: tuple[int, int], long: tuple[int, int]) -> TextScale:
        """From two (words, tokens)."""
        per_word = (long[1] - short[1]) / (long[0] - short[0])
        if per_word <= 0:  # the server's count does not grow with the prompt; it is of no use
            return cls()
        return cls(per_word, short[1] - per_word * short[0], is_measured=True)

    def words(self, tokens: int, *, with_overhead: bool = True) -> int:
        """How many make about so many tokens; at least one."""
        return max(1, round((tokens - self.overhead * with_overhead) / self.per_word))


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Random prompts: ids as tuples, or text."""

    kind: PromptKind
    scale: TextScale = TextScale()
    id_range: Lengths = ID_RANGE

    def __str__(self) -> str:
        return "prompts as ids" if self.kind == "ids" else "prompts as text"

    def make(self, tokens: int, rng: random.Random, *, is_part: bool = False) -> tuple[int, ...] | str:
        """A prompt of so many tokens, or a part of one, which the template's overhead is not charged to.

        With the same ``rng`` a longer one begins with the shorter one.
        """
        if self.kind == "ids":
            return tuple(self.id_range.draw(rng) for _ in range(tokens))
        return " ".join(rng.choice(WORDS) for _ in range(self.scale.words(tokens, with_overhead=not is_part)))
