"""One cache group's blocks: which are free, which hold cached content, and in which order that is given up."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from octavo.core.cache_group import CacheGroup
from octavo.memory.block_pool import BlockPool

if TYPE_CHECKING:
    from octavo.memory.prefix_tree import Node

NO_BLOCK = -1
_OUT_OF_SIGHT = 1 << 40  # on the clock of "least recently used": before everything else


class GroupBlocks:
    """The pool of one group, and the nodes of the prefix tree that have a block of it.

    The tree holds one reference to each block that it contains. A block that only the tree holds is *unreferenced*: its
    content may be lost when somebody needs the room. In a full group only leaves of the tree are given up, since a tail
    without its head is useless; in the others any block.
    """

    __slots__ = (
        "_heap", "_pushes", "block_size", "group", "index", "is_full", "node_of", "num_cached", "num_evicted",
        "num_unreferenced", "pool",
    )  # fmt: skip

    def __init__(self, group: CacheGroup, index: int, num_blocks: int, block_size: int) -> None:
        """index: of the group among those of the model."""
        self.group = group
        self.index = index
        self.is_full = group.kind == "full"
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.node_of: list[Node | None] = [None] * num_blocks
        self.num_cached = self.num_unreferenced = self.num_evicted = 0
        #: (last used, tie, node) of what can be given up; checked when popped
        self._heap: list[tuple[int, int, Node]] = []
        self._pushes = 0

    @property
    def num_available(self) -> int:
        """Blocks that can be had now: free, or cached and held by nobody."""
        return self.pool.num_free + self.num_unreferenced

    def first_block(self, position: int) -> int:
        """The first block of positions that a query at ``position`` reads (no state group is asked)."""
        return 0 if self.is_full else max(0, position - self.group.window + 1) // self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """``CacheGroup.blocks_for``."""
        return self.group.blocks_for(num_tokens, self.block_size)

    # What the tree holds

    def attach(self, node: Node, block: int, now: int) -> None:
        """``block``, which a sequence holds, becomes this group's block of ``node``. now: the tree's clock."""
        assert self.node_of[block] is None, f"block {block} is cached as something else"
        self.node_of[block] = node
        node.blocks[self.index] = block
        node.last_used[self.index] = now
        self.pool.retain(block)
        self.num_cached += 1

    def detach(self, node: Node) -> bool:
        """``node`` gives up its block, if it has one -> whether cached content was lost with it."""
        block = node.blocks[self.index]
        if block == NO_BLOCK:
            return False
        node.blocks[self.index] = NO_BLOCK
        self.node_of[block] = None
        self.num_cached -= 1
        lost = self.pool.release(block) == 0
        self.num_unreferenced -= lost
        self.num_evicted += lost
        return lost

    def retain(self, block: int, now: int) -> None:
        """One more sequence, or copy, holds ``block``."""
        refs = self.pool.retain(block)
        node = self.node_of[block]
        if node is not None:
            node.last_used[self.index] = now
            self.num_unreferenced -= refs == 2

    def release(self, block: int, now: int, *, out_of_sight: bool = False) -> None:
        """One holder less. out_of_sight: it has left its sequence's window, so it is the first to be given up."""
        refs = self.pool.release(block)
        node = self.node_of[block]
        if node is not None and refs == 1:
            self.num_unreferenced += 1
            node.last_used[self.index] = now - _OUT_OF_SIGHT if out_of_sight else now
            self.offer(node)

    def offer(self, node: Node) -> None:
        """``node`` may have become one whose block can be given up."""
        if not self._can_go(node):
            return
        self._pushes += 1
        heapq.heappush(self._heap, (node.last_used[self.index], self._pushes, node))
        if len(self._heap) > 4 * self.num_cached + 64:  # most entries are stale
            candidates = [node for node in self.node_of if node is not None and self._can_go(node)]
            self._heap = [(node.last_used[self.index], i, node) for i, node in enumerate(candidates)]
            heapq.heapify(self._heap)

    def least_recently_used(self) -> Node | None:
        """Whose block is to be given up next."""
        while self._heap:
            last_used, _, node = heapq.heappop(self._heap)
            if node.last_used[self.index] == last_used and self._can_go(node):
                return node
        return None

    def unreferenced(self) -> list[Node]:
        return [n for n in self.node_of if n is not None and self.pool.refs(n.blocks[self.index]) == 1]

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` naming what is inconsistent. O(blocks)."""
        self.pool.check_integrity()
        evictable = {id(n) for used, _, n in self._heap if n.last_used[self.index] == used}
        cached = [node for node in self.node_of if node is not None]
        for block, node in enumerate(self.node_of):
            if node is None:
                continue
            assert node.alive, f"block {block} is cached by a node that has left the tree"
            assert node.blocks[self.index] == block, f"block {block} is cached by a node that has another"
            assert self.pool.refs(block) >= 1, f"block {block} is cached but free"
            assert not self._can_go(node) or id(node) in evictable, f"block {block} can never be evicted"
        idle = len(self.unreferenced())
        assert len(cached) == self.num_cached, f"{len(cached)} blocks are cached, counted {self.num_cached}"
        assert idle == self.num_unreferenced, f"{idle} unreferenced, counted {self.num_unreferenced}"

    def _can_go(self, node: Node) -> bool:
        block = node.blocks[self.index]
        return block != NO_BLOCK and self.pool.refs(block) == 1 and not (self.is_full and node.children)
