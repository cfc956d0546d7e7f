"""What the KV cache tells of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """One group's blocks: ``free + cached + pinned == num_blocks``."""

    name: str
    num_blocks: int
    free_blocks: int
    cached_blocks: int  # in the prefix tree, held by no sequence: reusable, and reclaimable
    evictions: int  # cached blocks that lost their content

    @property
    def pinned_blocks(self) -> int:
        """Held by sequences."""
        return self.num_blocks - self.free_blocks - self.cached_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Counters of the KV cache."""

    groups: tuple[GroupStats, ...]
    nodes: int  # blocks of positions in the prefix tree, pinned or not
    depth: int  # blocks on its longest path
    lookups: int  # one per admission that asked the tree
    hits: int
    misses: int
    hit_tokens: int
    lookup_tokens: int  # tokens that the lookups hoped for

    # over all groups
    @property
    def num_blocks(self) -> int:
        return sum(group.num_blocks for group in self.groups)

    @property
    def free_blocks(self) -> int:
        return sum(group.free_blocks for group in self.groups)

    @property
    def cached_blocks(self) -> int:
        return sum(group.cached_blocks for group in self.groups)

    @property
    def pinned_blocks(self) -> int:
        return sum(group.pinned_blocks for group in self.groups)

    @property
    def evictions(self) -> int:
        return sum(group.evictions for group in self.groups)
