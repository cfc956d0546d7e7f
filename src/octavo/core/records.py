"""How the engine's records are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def hot_record(cls: type[T]) -> type[T]:
    """A record made per sequence and step: frozen for the type checker, not at run time.

    A frozen dataclass assigns each field through ``object.__setattr__``: 5.6 us for a ScheduledChunk against 1.5 us
    here, and there are 64 of them in a step of a few milliseconds.
    """
    return dataclass(slots=True, kw_only=True)(cls)
