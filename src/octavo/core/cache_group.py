"""What the layers of a model keep of a sequence. Layers that keep the same kind of thing form a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CacheKind = Literal["full", "window", "state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers alike in what they keep. They share blocks, a block table per sequence, and fate.

    full: keys and values of every position. window: of those that a query can still see. state: one state of fixed
    size, which every position changes.
    """

    kind: CacheKind
    layers: tuple[int, ...] = ()
    window: int = 0  # of a window group: a query at p sees positions (p - window, p]
    snapshot_blocks: int = 16  # of a state group: blocks of positions from one state that is kept to the next

    @property
    def name(self) -> str:
        """For people: "full", "window 512", "state"."""
        return f"window {self.window}" if self.kind == "window" else self.kind

    def blocks_for(self, num_tokens: int, block_size: int) -> int:
        """Most blocks that a sequence of ``num_tokens`` holds at once, if no step gives it more than one.

        Of a window group: with one position more than the window shows (``KVCacheManager.commit``).
        """
        if self.kind == "state":
            return 2  # the one that it reads, and the one that it writes where the first is shared
        whole = -(-num_tokens // block_size)
        return whole if self.kind == "full" else min(whole, (self.window + 2 * block_size - 2) // block_size + 1)


FULL = CacheGroup(kind="full")


def group_by_window(windows: Sequence[int | None]) -> tuple[CacheGroup, ...]:
    """The groups of attention layers with these windows (None: a layer that sees everything), the widest first."""
    layers: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        layers.setdefault(window, []).append(layer)
    order = sorted(layers, key=lambda window: (window is not None, -(window or 0)))
    return tuple(
        CacheGroup(kind="full" if window is None else "window", layers=tuple(layers[window]), window=window or 0)
        for window in order
    )
