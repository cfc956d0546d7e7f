"""The only door to the KV blocks: match, share, copy, grow, commit, release."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.memory.block_pool import BlockPool
from octavo.memory.block_table import BlockTable
from octavo.memory.prefix_tree import Match, Node, PrefixTree, hash_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Counters of the KV cache. Blocks: ``free + cached + pinned == num_blocks``."""

    num_blocks: int
    free_blocks: int
    cached_blocks: int  # in the prefix tree, held by no sequence: reusable, and reclaimable
    pinned_blocks: int  # held by sequences
    nodes: int  # blocks in the prefix tree, pinned or not
    depth: int  # blocks on its longest path
    lookups: int  # one per admission that asked the tree
    hits: int
    misses: int
    hit_tokens: int
    lookup_tokens: int  # tokens that the lookups hoped for
    evictions: int  # cached blocks that lost their content


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One cached block, for people."""

    block: int
    depth: int
    token_ids: tuple[int, ...]
    holders: int  # sequences that hold it now
    children: int
    last_used: int  # on the tree's own clock
    salted: bool


class KVCacheManager:
    """Block ids of all sequences, and the prefix tree over them.

    Life of a sequence here: ``lookup`` (or ``fork``) -> ``fits`` -> ``open`` -> ``grow`` and ``commit`` by turns ->
    ``release``. The caller plans a step with ``lookup``/``open``/``grow``/``release``, takes the copies with
    ``take_copies``, runs the step, then ``commit``s what was computed and calls ``end_step``.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size} but must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._lookups = self._hits = self._hit_tokens = self._lookup_tokens = 0
        self.clear()

    def clear(self) -> None:
        """All blocks are free, nothing is cached; tables handed out before must not be used any more. O(blocks)."""
        self._pool = BlockPool(self.num_blocks)
        self._tree = PrefixTree(self._pool, self.block_size)
        self._tables: dict[int, BlockTable] = {}  # by id(); for check_integrity
        self._in_flight: dict[int, BlockTable] = {}  # hash of a block -> whose table will hold it
        self._copies: dict[int, tuple[int, int]] = {}  # dst -> (src, num_tokens), of the step being planned
        self._copy_sources: list[int] = []  # retained until end_step

    # Room

    @property
    def num_available(self) -> int:
        """Blocks that can be had now: free, or cached and held by nobody."""
        return self._pool.num_free + self._tree.num_unreferenced

    @property
    def num_evicted(self) -> int:
        """Cached blocks that lost their content, ever."""
        return self._tree.num_evicted

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    # Starting a sequence

    def lookup(self, tokens: Sequence[int], limit: int, salt: bytes = b"") -> Match:
        """How much of ``tokens[:limit]`` is cached, and why not more. Changes nothing. O(limit).

        Reason "in flight": a running sequence is about to compute the next block; ``is_in_flight(match.next_hash)``
        tells when that has changed.
        """
        if not self.enable_prefix_caching:
            return Match(reason="off")
        match = self._tree.find(tokens, limit, salt)
        if match.reason != "end of prompt" and self.is_in_flight(match.next_hash):
            return replace(match, reason="in flight")
        return match

    def fork(self, table: BlockTable, num_tokens: int) -> Match:
        """The first ``num_tokens`` positions of another sequence, all computed, as a match to ``open``."""
        whole, rest = divmod(num_tokens, self.block_size)
        assert whole <= table.num_full, f"{num_tokens} tokens are not computed yet"
        return Match(
            num_tokens=num_tokens,
            blocks=tuple(table.head(whole)),
            copy_from=table[whole] if rest else None,
            reason="forked",
        )

    def is_in_flight(self, block_hash: int | None) -> bool:
        """Whether a running sequence will compute this block."""
        return block_hash in self._in_flight

    def fits(self, match: Match, num_tokens: int, reserve: int) -> bool:
        """Whether a sequence of ``num_tokens`` that begins with ``match`` fits beside ``reserve`` more blocks."""
        # cached blocks that nobody holds yet: sharing them makes them unavailable
        idle = sum(self._pool.refs(block) == 1 and self._tree.contains(block) for block in match.blocks)
        return self.blocks_for(num_tokens) - len(match.blocks) + reserve <= self.num_available - idle

    def open(
        self, match: Match, tokens: Sequence[int], capacity_tokens: int, salt: bytes = b""
    ) -> tuple[BlockTable, int]:
        """Start a sequence -> its table and the positions ``[0, n)`` it need not compute. Call after ``fits``.

        tokens: all that are known. Blocks of them that the sequence is going to compute are announced as in flight.
        capacity_tokens: the longest it can become. The head of a partly matching block is copied into a fresh one
        (see ``take_copies``), or left out if there is no room for both.
        """
        self._tree.tick()
        table = BlockTable(self.blocks_for(capacity_tokens), salt)
        self._tables[id(table)] = table
        for block in match.blocks:
            self._retain(block)
            table.append(block)
        table.num_full = len(match.blocks)
        if match.node is not None and match.blocks:
            table.node, table.num_committed = match.node, len(match.blocks)
        cached = len(match.blocks) * self.block_size
        if match.copy_from is not None:
            self._retain(match.copy_from)
            if self.num_available > 0:
                table.append(self._allocate())
                self._copies[table[len(table) - 1]] = (match.copy_from, match.num_tokens - cached)
                self._copy_sources.append(match.copy_from)
                cached = match.num_tokens
            else:
                self._release(match.copy_from)
        if self.enable_prefix_caching:
            self._announce(table, tokens)
        return table, cached

    def count_lookup(self, wanted_tokens: int, cached_tokens: int) -> None:
        """Count one admission's lookup in the statistics; retries of a waiting request are not lookups."""
        self._lookups += 1
        self._hits += cached_tokens > 0
        self._hit_tokens += cached_tokens
        self._lookup_tokens += wanted_tokens

    def take_copies(self) -> tuple[tuple[int, int, int], ...]:
        """(src, dst, num_tokens) to run before any KV write of this step; sources stay intact until ``end_step``."""
        if not self._copies:
            return ()
        copies = tuple((src, dst, num_tokens) for dst, (src, num_tokens) in self._copies.items())
        self._copies.clear()
        return copies

    # A running sequence

    def grow(self, table: BlockTable, num_tokens: int) -> int:
        """Make room for positions ``[0, num_tokens)`` as far as there are blocks -> positions covered."""
        wanted = self.blocks_for(num_tokens)
        while table.num_blocks < wanted and (self._pool.num_free or self._tree.num_unreferenced):
            table.append(self._allocate())
        return min(num_tokens, table.num_blocks * self.block_size)

    def commit(self, table: BlockTable, tokens: Sequence[int], num_computed: int) -> None:
        """Positions ``[0, num_computed)`` hold the KV of ``tokens``: their whole blocks enter the tree.

        Where a node exists already (two sequences computed the same), the table keeps its private twin.
        Costs nothing unless a block was completed.
        """
        size = self.block_size
        full = num_computed // size
        if full == table.num_full:
            return
        table.num_full = full
        if not self.enable_prefix_caching:
            return
        tree, salt = self._tree, table.salt
        node, first = table.node, table.num_committed
        if node is not None and not node.alive:
            node, first = None, 0  # our path was uncached: walk it again from the root
        for i in range(first, full):
            key = tuple(tokens[i * size : (i + 1) * size])
            node = tree.child(node, key, salt) or tree.insert(node, key, table[i], salt)
            if table.in_flight and self._in_flight.get(node.path_hash) is table:
                del self._in_flight[node.path_hash]
        table.node, table.num_committed = node, full

    def release(self, table: BlockTable, *, suspect: bool = False) -> None:
        """End of a sequence, or its preemption. What it committed stays cached, unless ``suspect`` (bad numbers).

        Copies planned into its blocks are dropped.
        """
        del self._tables[id(table)]
        self._tree.tick()
        for block_hash in table.in_flight:
            if self._in_flight.get(block_hash) is table:
                del self._in_flight[block_hash]
        for block in reversed(table.to_list()):
            node = self._tree.node_of(block)
            if suspect and node is not None:
                self._tree.remove_subtree(node)
            self._copies.pop(block, None)
            self._release(block)
        table.clear()

    def end_step(self) -> None:
        """The step has run or has failed: the sources of its copies are no longer needed."""
        for block in self._copy_sources:
            self._release(block)
        self._copy_sources.clear()
        self._copies.clear()

    # Reading

    def stats(self) -> CacheStats:
        """Counters now. O(1)."""
        free, cached = self._pool.num_free, self._tree.num_unreferenced
        return CacheStats(
            num_blocks=self.num_blocks,
            free_blocks=free,
            cached_blocks=cached,
            pinned_blocks=self.num_blocks - free - cached,
            nodes=self._tree.num_nodes,
            depth=self._tree.depth,
            lookups=self._lookups,
            hits=self._hits,
            misses=self._lookups - self._hits,
            hit_tokens=self._hit_tokens,
            lookup_tokens=self._lookup_tokens,
            evictions=self._tree.num_evicted,
        )

    def describe_tree(self, limit: int = 1000) -> tuple[NodeView, ...]:
        """The first ``limit`` cached blocks, each parent followed by its subtree."""
        views: list[NodeView] = []
        for node in self._tree.nodes():
            if len(views) == limit:
                break
            views.append(self._view(node))
        return tuple(views)

    def _view(self, node: Node) -> NodeView:
        return NodeView(
            block=node.block,
            depth=node.depth,
            token_ids=node.tokens,
            holders=self._pool.refs(node.block) - 1,
            children=len(node.children),
            last_used=node.last_used,
            salted=node.salt != b"",
        )

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` naming the first inconsistency. O(blocks): for idle times and tests."""
        self._pool.check_integrity()
        self._tree.check_integrity()
        holders = [int(self._tree.contains(block)) for block in range(self.num_blocks)]
        for block in self._copy_sources:
            holders[block] += 1
        in_tables = [0] * self.num_blocks
        for table in self._tables.values():
            ids = table.to_list()
            assert ids == [table[i] for i in range(len(table))], f"a table's view shows {ids}, not what it holds"
            assert len(set(ids)) == len(ids), f"a block stands twice in one table: {ids}"
            assert table.num_committed <= table.num_full <= len(ids) <= table.capacity, "a table's ranges overlap"
            for block in ids:
                holders[block] += 1
                in_tables[block] += 1
        for block, count in enumerate(holders):
            refs = self._pool.refs(block)
            assert refs == count, f"block {block} has {refs} references but {count} holders"
        for table in self._tables.values():
            for block in table.to_list()[table.num_full :]:
                assert in_tables[block] == 1, f"block {block} is being written but stands in {in_tables[block]} tables"
                assert not self._tree.contains(block), f"block {block} is being written but cached"
        for owner in self._in_flight.values():
            assert id(owner) in self._tables, "somebody may wait for a block of a sequence that is gone"

    # Parts

    def _announce(self, table: BlockTable, tokens: Sequence[int]) -> None:
        """Register the whole blocks of ``tokens`` that ``table`` does not have yet."""
        size = self.block_size
        path_hash = hash(table.salt)
        if table.node is not None:
            path_hash, first = table.node.path_hash, table.num_committed
        else:
            first = 0
        for i in range(first, len(tokens) // size):
            path_hash = hash_of(path_hash, tuple(tokens[i * size : (i + 1) * size]))
            if i >= table.num_full:
                table.in_flight.append(path_hash)
                self._in_flight.setdefault(path_hash, table)

    def _allocate(self) -> int:
        if self._pool.num_free == 0:
            self._tree.evict()
        return self._pool.allocate()

    def _retain(self, block: int) -> None:
        self._pool.retain(block)
        self._tree.retained(block)

    def _release(self, block: int) -> None:
        self._pool.release(block)
        self._tree.released(block)
