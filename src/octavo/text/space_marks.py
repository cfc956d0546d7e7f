"""Where text may be cut for vocabularies that spell a space as U+2581 (SentencePiece)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.text.vocabulary import DISGUISES, SPACE_MARK

_INNER = re.compile(f"([^\0{SPACE_MARK}]){SPACE_MARK}")
_MAX_JOINERS = 256


@dataclass(frozen=True, slots=True)
class SpaceMarks:
    """Words, which begin with their spaces, and which no token of the vocabulary joins.

    words: expression that matches the words of a line, for Python and Oniguruma; U+2581 for spaces
    seam:  matches before each place where a text may be cut, its spaces written either way
    """

    words: str
    seam: re.Pattern[str]


def find_space_marks(texts: Iterable[str]) -> SpaceMarks | None:
    """How the vocabulary ``texts`` keeps words apart; None if it does not.

    A space begins a word unless it stands behind a character that some token has before a space inside: Gemma has one
    token of that kind, ">\u2581</". What no token spans, no merge joins.
    """
    joiners = set(_INNER.findall("\0".join(texts)))
    if len(joiners) > _MAX_JOINERS:
        return None
    joining = "".join(map(re.escape, sorted(joiners)))
    joined = f"|[{joining}]{SPACE_MARK}*+" if joiners else ""
    return SpaceMarks(
        words=f"{SPACE_MARK}*+(?:[^{SPACE_MARK}{joining}]++{joined})++|{SPACE_MARK}++",
        seam=re.compile(f"[^ {SPACE_MARK}{joining}{DISGUISES}](?=[ {SPACE_MARK}])"),
    )
