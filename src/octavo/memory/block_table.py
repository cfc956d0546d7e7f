"""Which block holds which positions of one sequence."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.memory.prefix_tree import Node


class BlockTable:
    """Block ids of one running sequence: entry i holds positions ``[i * block_size, (i + 1) * block_size)``.

    The array is allocated once at its final size, so that views of it stay valid while the table grows. Only the
    ``KVCacheManager`` writes here. ``ids`` is a view (int32) of what is allocated.

    ```
    blocks   0 ........ num_committed ........ num_full ........ num_blocks ........ capacity
             in the tree, or a private twin    computed, full    being written       not yet allocated
    ```
    """

    __slots__ = ("_ids", "_view", "ids", "in_flight", "node", "num_blocks", "num_committed", "num_full", "salt")

    def __init__(self, capacity: int, salt: bytes) -> None:
        """capacity: blocks that the sequence can ever need; salt: whose part of the prefix tree it lives in."""
        self._ids = array("i", bytes(array("i").itemsize * capacity))
        self._view = memoryview(self._ids)
        self.ids = self._view[:0]  # made anew when the table grows, not for every step that reads it
        self.num_blocks = 0
        self.num_full = 0
        self.num_committed = 0
        self.salt = salt
        self.node: Node | None = None  # tree node of block num_committed - 1; None: commit from the root
        self.in_flight: list[int] = []  # hashes of the blocks announced to others

    @property
    def capacity(self) -> int:
        return len(self._ids)

    def __len__(self) -> int:
        return self.num_blocks

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.num_blocks:
            raise IndexError(f"block {index} of a table of {self.num_blocks}")
        return self._ids[index]

    def append(self, block: int) -> None:
        """Add one block at the end; ``IndexError`` beyond ``capacity``."""
        self._ids[self.num_blocks] = block
        self.num_blocks += 1
        self.ids = self._view[: self.num_blocks]

    def clear(self) -> None:
        """Forget the ids."""
        self.num_blocks = 0
        self.ids = self._view[:0]

    def head(self, num_blocks: int) -> memoryview[int]:
        """View, not copy, of the first ``num_blocks`` ids (int32)."""
        return self._view[:num_blocks]

    def to_list(self) -> list[int]:
        """Copy of the ids."""
        return self.ids.tolist()
