"""Which block holds which positions of one sequence."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.memory.group_blocks import NO_BLOCK

if TYPE_CHECKING:
    from octavo.memory.prefix_tree import Node


class BlockRow:
    """Block ids of one sequence in one group: entry i holds positions ``[i * block_size, (i + 1) * block_size)``.

    The array is allocated once at its final size, so that views of it stay valid while it grows. ``ids`` is a view
    (int32) of what has been allocated. Entries before ``first`` have been given back, and are NO_BLOCK.
    """

    __slots__ = ("_ids", "_view", "first", "ids", "num_blocks")

    def __init__(self, capacity: int) -> None:
        self._ids = array("i", bytes(array("i").itemsize * capacity))
        self._view = memoryview(self._ids)
        self.ids = self._view[:0]  # made anew when the row grows, not for every step that reads it
        self.num_blocks = 0
        self.first = 0

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.first

    @property
    def held(self) -> memoryview[int]:
        """View of the ids of the blocks that the sequence holds."""
        return self._view[self.first : self.num_blocks]

    def append(self, block: int) -> None:
        """Add one block at the end; ``IndexError`` beyond ``capacity``."""
        self._ids[self.num_blocks] = block
        self.num_blocks += 1
        self.ids = self._view[: self.num_blocks]

    def give_back(self, before: int) -> list[int]:
        """The ids of the entries below ``before`` that are still held; they leave the row."""
        given = self._ids[self.first : before].tolist()
        for index in range(self.first, before):
            self._ids[index] = NO_BLOCK
        self.first = max(self.first, before)
        return given


class StateRow:
    """The state of one sequence in one group: it is read from one slot and written to one, most often the same.

    ``ids`` is a view (int32) of (read, write); read is NO_BLOCK before the first position.
    """

    __slots__ = ("_ids", "ids", "latest")

    def __init__(self) -> None:
        self._ids = array("i", (NO_BLOCK, NO_BLOCK))
        self.ids = memoryview(self._ids)
        self.latest: Node | None = None  # that was given the state last, while it may give it up for a later one

    @property
    def read(self) -> int:
        return self._ids[0]

    @property
    def write(self) -> int:
        return self._ids[1]

    @property
    def num_held(self) -> int:
        return len(self.held)

    @property
    def held(self) -> list[int]:
        return [block for block in {*self._ids} if block != NO_BLOCK]

    def set(self, read: int, write: int) -> None:
        self._ids[0], self._ids[1] = read, write


class BlockTable:
    """What one running sequence holds, a row for each group. Only the ``KVCacheManager`` writes here.

    ```
    blocks   0 ........ num_committed ........ num_full ........ num_blocks ........ capacity
             in the tree, or a private twin    computed, full    being written       not yet allocated
    ```
    """

    __slots__ = (
        "covered", "in_flight", "last_cut", "node", "num_committed", "num_computed", "num_full", "paged", "rows",
        "salt", "states", "views",
    )  # fmt: skip

    def __init__(self, rows: tuple[BlockRow | StateRow, ...], salt: bytes) -> None:
        """salt: whose part of the prefix tree the sequence lives in."""
        self.rows = rows
        self.paged = tuple((group, row) for group, row in enumerate(rows) if isinstance(row, BlockRow))
        self.states = tuple((group, row) for group, row in enumerate(rows) if isinstance(row, StateRow))
        self.views: tuple[Sequence[int], ...] = ()  # of the rows' ids
        self.covered = 0  # positions that may be run: every group has room for them
        self.num_computed = 0  # positions
        self.num_full = 0
        self.num_committed = 0
        self.last_cut = 0  # the last position before which a state group wants a chunk to end
        self.salt = salt
        self.node: Node | None = None  # tree node of block num_committed - 1; None: commit from the root
        self.in_flight: list[int] = []  # hashes of the blocks announced to others

    def __len__(self) -> int:
        """Blocks that it holds, of all groups."""
        return sum(row.num_held for row in self.rows)

    @property
    def num_blocks(self) -> int:
        """Blocks of positions that every group with blocks of positions has had room for."""
        return min((row.num_blocks for _, row in self.paged), default=self.num_full)

    def forget(self) -> None:
        """Its blocks are not its any more."""
        self.rows = self.paged = self.states = self.views = ()

    def to_list(self, group: int = 0) -> list[int]:
        """Copy of a group's ids."""
        return list(self.rows[group].ids)
