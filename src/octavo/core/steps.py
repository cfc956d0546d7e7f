"""Long work that can be interrupted: a generator that yields between pieces and returns its result.

Whoever drives it decides what happens in between: other work, a look at the clock, nothing (``finish``), or the end
(``close``).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]


def finish(steps: Steps[T]) -> T:
    """All of it at once, and its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
