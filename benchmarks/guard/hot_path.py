"""What a hot path is: a name, and a set-up that returns one repeatable iteration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

#: What a path's count depends on beside octavo's own code: the interpreter; numpy too; the C++ compiler and libc.
RestsOn = Literal["python", "numpy", "native"]
Iteration = Callable[[], object]


@dataclass(frozen=True, slots=True)
class HotPath:
    """``prepare`` sets up and returns an iteration, of which ``repeats`` are counted.

    An iteration does the same work however often it has run. Its sizes and seeds are part of the figure: change one,
    and the stored figure says nothing about the past.
    """

    name: str
    rests_on: RestsOn
    repeats: int
    prepare: Callable[[], Iteration]


PATHS: dict[str, HotPath] = {}


def hot_path(
    name: str, rests_on: RestsOn = "python", *, repeats: int = 1
) -> Callable[[Callable[[], Iteration]], Callable[[], Iteration]]:
    """Register a set-up under ``name``."""

    def register(prepare: Callable[[], Iteration]) -> Callable[[], Iteration]:
        assert name not in PATHS, name
        PATHS[name] = HotPath(name, rests_on, repeats, prepare)
        return prepare

    return register
