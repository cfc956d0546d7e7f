"""The supply of KV blocks: a free list and one reference count per block."""

from __future__ import annotations


class BlockPool:
    """Block ids ``[0, num_blocks)``. Any free block fits anyone, so there is no fragmentation to manage.

    A block has one reference per holder: each block table it stands in, the prefix tree, each copy that reads it in
    this step. At zero it is free again. Every method is O(1) except ``check_integrity``.
    """

    __slots__ = ("_free", "_refs", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks} but a pool needs at least 1")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is the warmest in cache
        self._refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def refs(self, block: int) -> int:
        """How many hold ``block``; 0 means free."""
        return self._refs[block]

    def allocate(self) -> int:
        """Take a free block with one reference. ``IndexError`` when there is none: ask ``num_free`` first."""
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def retain(self, block: int) -> int:
        """One more holder of a block that is in use -> its new count."""
        assert self._refs[block] > 0, f"block {block} is free and cannot be shared"
        self._refs[block] += 1
        return self._refs[block]

    def release(self, block: int) -> int:
        """One holder less -> the new count. At 0 the block is free."""
        refs = self._refs[block] - 1
        assert refs >= 0, f"block {block} is free already"
        self._refs[block] = refs
        if refs == 0:
            self._free.append(block)
        return refs

    def check_integrity(self) -> None:
        """Every block is either free, once, with count 0, or in use. Raises ``AssertionError`` naming the block."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is on the free list twice"
        for block, refs in enumerate(self._refs):
            assert refs >= 0, f"block {block} has {refs} references"
            assert (refs == 0) == (block in free), f"block {block} has {refs} references, on free list: {block in free}"
