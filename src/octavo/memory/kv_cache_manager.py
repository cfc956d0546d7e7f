"""The only door to the KV blocks: match, share, copy, grow, commit, release."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from octavo.core.cache_group import FULL, CacheGroup
from octavo.memory.block_table import BlockRow, BlockTable, StateRow
from octavo.memory.cache_stats import CacheStats, GroupStats
from octavo.memory.group_blocks import NO_BLOCK, GroupBlocks
from octavo.memory.prefix_tree import Match, Node, PrefixTree, hash_of

NODES_PER_BLOCK = 8  # of a tree without a full group: how much longer than their blocks its paths may be


class KVCacheManager:
    """Block ids of all sequences in all cache groups, and the prefix tree over them.

    Life of a sequence here: ``lookup`` (or ``fork``) -> ``fits`` -> ``open`` -> ``grow`` and ``commit`` by turns ->
    ``release``. The caller plans a step with ``lookup``/``open``/``grow``/``release``, takes the copies with
    ``take_copies``, runs the step, then ``commit``s what was computed and calls ``end_step``.
    """

    def __init__(
        self,
        num_blocks: int | Sequence[int],
        block_size: int,
        *,
        groups: Sequence[CacheGroup] = (FULL,),
        enable_prefix_caching: bool = True,
    ) -> None:
        """num_blocks: of each group."""
        if block_size < 1:
            raise ValueError(f"block_size is {block_size} but must be at least 1")
        self.num_blocks = (num_blocks,) * len(groups) if isinstance(num_blocks, int) else tuple(num_blocks)
        self.block_size = block_size
        self.groups = tuple(groups)
        self.enable_prefix_caching = enable_prefix_caching
        self.has_one_full_group = self.groups[0].kind == "full" and len(self.groups) == 1
        #: ``commit`` must be called after every step, not only when a block of positions has been completed
        self.commits_every_step = any(group.kind == "state" for group in groups)
        self._lookups = self._hits = self._hit_tokens = self._lookup_tokens = 0
        self.clear()

    def clear(self) -> None:
        """All blocks are free, nothing is cached; tables handed out before must not be used any more. O(blocks)."""
        size = self.block_size
        pools = enumerate(zip(self.groups, self.num_blocks, strict=True))
        self._blocks = tuple(GroupBlocks(group, index, count, size) for index, (group, count) in pools)
        self._tree = PrefixTree(self._blocks, size)
        self._tables: dict[int, BlockTable] = {}  # by id(); for check_integrity
        self._in_flight: dict[int, BlockTable] = {}  # hash of a block -> whose table will hold it
        self._copies: dict[tuple[int, int], tuple[int, int]] = {}  # (group, dst) -> (src, num_tokens), being planned
        self._copy_sources: list[tuple[GroupBlocks, int]] = []  # retained until end_step

    # Room

    @property
    def num_available(self) -> int:
        """Blocks that can be had now, free or cached and held by nobody, in the group that has fewest."""
        return min(blocks.num_available for blocks in self._blocks)

    @property
    def num_evicted(self) -> int:
        """Cached blocks that lost their content, ever."""
        return sum(blocks.num_evicted for blocks in self._blocks)

    def shortage(self, num_tokens: int) -> tuple[int, int] | None:
        """(blocks needed, blocks there are) of a group that can never hold a sequence of ``num_tokens``, if any."""
        needs = ((blocks.blocks_for(num_tokens), blocks.pool.num_blocks) for blocks in self._blocks)
        return next((need for need in needs if need[0] > need[1]), None)

    def room_beside(self, running: Sequence[tuple[BlockTable, int]]) -> tuple[int, ...]:
        """Blocks of each group that are left beside what ``running`` sequences, of so many tokens, need to go on.

        That is what they still have to allocate for the tokens they know, and one more for each.
        """
        room = []
        for g, blocks in enumerate(self._blocks):
            owed = [blocks.blocks_for(length) - table.rows[g].num_held for table, length in running]
            room.append(blocks.num_available - len(running) - sum([count for count in owed if count > 0]))
        return tuple(room)

    def fits(self, match: Match, num_tokens: int, room: Sequence[int]) -> bool:
        """Whether a sequence of ``num_tokens`` that begins with ``match`` fits in ``room`` blocks of each group."""
        for g, blocks in enumerate(self._blocks):
            shared = [block for block in match.blocks[g] if block != NO_BLOCK] if match.blocks else []
            # cached blocks that nobody holds yet: sharing them makes them unavailable
            idle = sum(blocks.pool.refs(block) == 1 and blocks.node_of[block] is not None for block in shared)
            if blocks.blocks_for(num_tokens) - len(shared) > room[g] - idle:
                return False
        return True

    # Starting a sequence

    def lookup(self, tokens: Sequence[int], limit: int, salt: bytes = b"") -> Match:
        """How much of ``tokens[:limit]`` is cached, and why not more. Changes nothing. O(limit).

        Reason "in flight": a running sequence is about to compute the next block; ``is_in_flight(match.next_hash)``
        tells when that has changed.
        """
        if not self.enable_prefix_caching:
            return Match(reason="off")
        match = self._tree.find(tokens, limit, salt)
        return replace(match, reason="in flight") if self.is_in_flight(match.next_hash) else match

    def fork(self, table: BlockTable, num_tokens: int) -> Match | None:
        """The first ``num_tokens`` positions of another sequence, all computed, as a match to ``open``.

        None if that one has given back what they can be gone on from: a window has left them behind, or a state.
        """
        whole, rest = divmod(num_tokens, self.block_size)
        assert whole <= table.num_full, f"{num_tokens} tokens are not computed yet"
        shared = []
        for blocks, row in zip(self._blocks, table.rows, strict=True):
            if isinstance(row, StateRow) or row.first > blocks.first_block(num_tokens):
                return None
            shared.append(row.ids[:whole].tolist())
        copy_from = tuple(row.ids[whole] for _, row in table.paged) if rest else None
        return Match(num_tokens=num_tokens, whole=whole, blocks=tuple(shared), copy_from=copy_from, reason="forked")

    def is_in_flight(self, block_hash: int | None) -> bool:
        """Whether a running sequence will compute this block."""
        return block_hash in self._in_flight

    def open(
        self, match: Match, tokens: Sequence[int], capacity_tokens: int, salt: bytes = b""
    ) -> tuple[BlockTable, int]:
        """Start a sequence -> its table and the positions ``[0, n)`` it need not compute. Call after ``fits``.

        tokens: all that are known. Blocks of them that the sequence is going to compute are announced as in flight.
        capacity_tokens: the longest it can become. The head of a partly matching block is copied into a fresh one
        (see ``take_copies``), or left out if there is no room for both.
        """
        self._tree.clock += 1
        capacity = -(-capacity_tokens // self.block_size)
        table = BlockTable(
            tuple(StateRow() if group.kind == "state" else BlockRow(capacity) for group in self.groups), salt
        )
        self._tables[id(table)] = table
        cached = match.whole * self.block_size
        for g, row in table.paged if match.whole else ():
            for block in match.blocks[g]:
                if block != NO_BLOCK:
                    self._retain(g, block)
                row.append(block)
            row.first = next((i for i, block in enumerate(match.blocks[g]) if block != NO_BLOCK), match.whole)
        for g, state in table.states if match.whole else ():
            (slot,) = match.blocks[g]
            self._retain(g, slot)
            state.set(slot, NO_BLOCK)
        table.num_full = match.whole
        if match.node is not None:
            table.node, table.num_committed = match.node, match.whole
        if match.copy_from is not None:
            cached = self._copy_head(table, match, cached)
        table.num_computed = cached
        table.last_cut = (len(tokens) - 1) // self.block_size * self.block_size
        self._show(table)
        if self.enable_prefix_caching:
            self._announce(table, tokens)
        return table, cached

    def count_lookup(self, wanted_tokens: int, cached_tokens: int) -> None:
        """Count one admission's lookup in the statistics; retries of a waiting request are not lookups."""
        self._lookups += 1
        self._hits += cached_tokens > 0
        self._hit_tokens += cached_tokens
        self._lookup_tokens += wanted_tokens

    def take_copies(self) -> tuple[tuple[int, int, int, int], ...]:
        """(group, src, dst, num_tokens) to run before any KV write of this step; sources stay until ``end_step``."""
        if not self._copies:
            return ()
        copies = tuple((group, src, dst, num_tokens) for (group, dst), (src, num_tokens) in self._copies.items())
        self._copies.clear()
        return copies

    # A running sequence

    def grow(self, table: BlockTable, num_tokens: int) -> int:
        """Make room to run positions up to ``num_tokens``, as far as there are blocks -> positions covered."""
        wanted = -(-num_tokens // self.block_size)
        covered = wanted * self.block_size
        for g, row in table.paged:
            blocks = self._blocks[g]
            while row.num_blocks < wanted and (blocks.pool.num_free or blocks.num_unreferenced):
                row.append(self._allocate(blocks))
            covered = min(covered, row.num_blocks * self.block_size)
        for g, state in table.states:
            if not self._can_write(self._blocks[g], state):
                covered = min(covered, table.num_computed)
        table.covered = min(covered, num_tokens) if table.states else covered
        self._show(table)
        return min(num_tokens, table.covered)

    def cut(self, table: BlockTable, end: int) -> int:
        """Where a chunk that begins at the first position not computed and wants to go to ``end`` has to stop.

        A state group keeps what a later prompt can go on from only where chunks end: at every ``snapshot_blocks``
        blocks, and at the last whole block before the last known token.
        """
        start = table.num_computed
        for g, _ in table.states:
            every = self.groups[g].snapshot_blocks * self.block_size
            end = min(end, (start // every + 1) * every)
            if start < table.last_cut < end:
                end = table.last_cut
        return end

    def commit(self, table: BlockTable, tokens: Sequence[int], num_computed: int) -> None:
        """Positions ``[0, num_computed)`` hold the KV of ``tokens``: their whole blocks enter the tree.

        Where a node exists already (two sequences computed the same), the table keeps its private twin. Window groups
        give back what no query from ``num_computed - 1`` on can see (the last position may be run again, by a fork).
        Costs nothing unless a block was completed, or there is a state.
        """
        size = self.block_size
        table.num_computed = num_computed
        full = num_computed // size
        for g, state in table.states:
            self._written(self._blocks[g], state)
        if full > table.num_full:
            table.num_full = full
            if self.enable_prefix_caching:
                self._cache(table, tokens)
            for g, row in table.paged:
                blocks = self._blocks[g]
                if blocks.is_full:
                    continue
                for block in row.give_back(min(blocks.first_block(num_computed - 1), full)):
                    blocks.release(block, self._tree.clock, out_of_sight=True)
        if table.states:
            table.covered = num_computed  # until it is known which slot the next step writes

    def release(self, table: BlockTable, *, suspect: bool = False) -> None:
        """End of a sequence, or its preemption. What it committed stays cached, unless ``suspect`` (bad numbers).

        Copies planned into its blocks are dropped.
        """
        del self._tables[id(table)]
        self._tree.clock += 1
        for block_hash in table.in_flight:
            if self._in_flight.get(block_hash) is table:
                del self._in_flight[block_hash]
        for blocks, row in zip(self._blocks, table.rows, strict=True):
            for block in reversed(list(row.held)):
                node = blocks.node_of[block]
                if suspect and node is not None:
                    self._tree.remove_subtree(node)
                self._copies.pop((blocks.index, block), None)
                blocks.release(block, self._tree.clock)
        table.forget()
        self._tree.shrink(NODES_PER_BLOCK * sum(self.num_blocks))

    def end_step(self) -> None:
        """The step has run or has failed: the sources of its copies are no longer needed."""
        for blocks, block in self._copy_sources:
            blocks.release(block, self._tree.clock)
        self._copy_sources.clear()
        self._copies.clear()

    # Reading

    def stats(self) -> CacheStats:
        """Counters now. O(1)."""
        return CacheStats(
            groups=tuple(
                GroupStats(
                    name=blocks.group.name,
                    num_blocks=blocks.pool.num_blocks,
                    free_blocks=blocks.pool.num_free,
                    cached_blocks=blocks.num_unreferenced,
                    evictions=blocks.num_evicted,
                )
                for blocks in self._blocks
            ),
            nodes=self._tree.num_nodes,
            depth=self._tree.depth,
            lookups=self._lookups,
            hits=self._hits,
            misses=self._lookups - self._hits,
            hit_tokens=self._hit_tokens,
            lookup_tokens=self._lookup_tokens,
        )

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` naming the first inconsistency. O(blocks): for idle times and tests."""
        self._tree.check_integrity()
        for table in self._tables.values():
            assert table.num_committed <= table.num_full <= table.num_blocks, "a table's ranges overlap"
            assert [list(view) for view in table.views] == [list(row.ids) for row in table.rows], "a view is stale"
        for blocks in self._blocks:
            self._check_group(blocks)
        for owner in self._in_flight.values():
            assert id(owner) in self._tables, "somebody may wait for a block of a sequence that is gone"

    def _check_group(self, blocks: GroupBlocks) -> None:
        holders = [int(node is not None) for node in blocks.node_of]
        for group, block in self._copy_sources:
            holders[block] += group is blocks
        in_tables = [0] * len(holders)
        for table in self._tables.values():
            row = table.rows[blocks.index]
            ids = list(row.held)
            assert len(set(ids)) == len(ids), f"a block stands twice in one table: {ids}"
            if isinstance(row, BlockRow):
                assert set(row.ids[: row.first]) <= {NO_BLOCK}, "a table still names what it has given back"
            for block in ids:
                holders[block] += 1
                in_tables[block] += 1
        for block, count in enumerate(holders):
            refs = blocks.pool.refs(block)
            assert refs == count, f"block {block} of {blocks.group.name} has {refs} references but {count} holders"
        for table in self._tables.values():
            row = table.rows[blocks.index]
            written = [row.write] if isinstance(row, StateRow) else list(row.ids[table.num_full :])
            for block in written:
                if block != NO_BLOCK:
                    assert in_tables[block] == 1, f"block {block} is written but stands in {in_tables[block]} tables"
                    assert blocks.node_of[block] is None, f"block {block} is being written but cached"

    # Parts

    def _copy_head(self, table: BlockTable, match: Match, cached: int) -> int:
        """Plan the copies of a block's head in every group, if all have room -> positions that ``table`` then has."""
        assert match.copy_from is not None
        sources = list(zip(self._blocks, match.copy_from, strict=True))
        for blocks, source in sources:
            blocks.retain(source, self._tree.clock)
        if self.num_available == 0:
            for blocks, source in sources:
                blocks.release(source, self._tree.clock)
            return cached
        for (g, row), (blocks, source) in zip(table.paged, sources, strict=True):
            block = self._allocate(blocks)
            row.append(block)
            self._copies[g, block] = (source, match.num_tokens - cached)
        self._copy_sources += sources
        return match.num_tokens

    def _cache(self, table: BlockTable, tokens: Sequence[int]) -> None:
        """Bring the whole blocks of ``table`` into the tree, and the state after the last one if it is known."""
        size, tree, salt, now = self.block_size, self._tree, table.salt, self._tree.clock
        node, first = table.node, table.num_committed
        if node is not None and not node.alive:
            node, first = None, 0  # our path was uncached: walk it again from the root
        for i in range(first, table.num_full):
            key = tuple(tokens[i * size : (i + 1) * size])
            node = tree.child(node, key, salt) or tree.insert(node, key, salt)
            for g, row in table.paged:
                blocks, block = self._blocks[g], row.ids[i]
                if node.blocks[g] == NO_BLOCK and block != NO_BLOCK and blocks.node_of[block] is None:
                    blocks.attach(node, block, now)
            if table.in_flight and self._in_flight.get(node.path_hash) is table:
                del self._in_flight[node.path_hash]
        assert node is not None
        for g, state in table.states if table.num_computed == table.num_full * size else ():
            self._keep_state(self._blocks[g], state, node, table)
        tree.prune(node)
        table.node, table.num_committed = node, table.num_full

    def _keep_state(self, blocks: GroupBlocks, state: StateRow, node: Node, table: BlockTable) -> None:
        """The state after ``node`` enters the tree. Between those kept for good, it replaces the one before it."""
        latest, state.latest = state.latest, None
        slot = NO_BLOCK if latest is None else latest.blocks[blocks.index]
        if latest is not None and slot != NO_BLOCK and blocks.pool.refs(slot) == 1:
            self._tree.drop(latest, blocks)
        if node.blocks[blocks.index] == NO_BLOCK and blocks.node_of[state.read] is None:
            blocks.attach(node, state.read, self._tree.clock)
            if node.depth % blocks.group.snapshot_blocks and node.depth * self.block_size != table.last_cut:
                state.latest = node

    def _can_write(self, blocks: GroupBlocks, state: StateRow) -> bool:
        """Settle which slot the next step writes: the one it reads, or a fresh one if others need what is in that."""
        read = state.read
        if state.write != NO_BLOCK:
            return True
        if read != NO_BLOCK and blocks.pool.refs(read) == 1:
            state.set(read, read)
            return True
        if blocks.num_available:
            state.set(read, self._allocate(blocks))
            return True
        node = blocks.node_of[read] if read != NO_BLOCK else None
        if node is not None and blocks.pool.refs(read) == 2:  # only the tree's: no room to keep it
            self._tree.drop(node, blocks)
            state.set(read, read)
            return True
        return False

    def _written(self, blocks: GroupBlocks, state: StateRow) -> None:
        """The step has run: what it wrote is what the next one reads."""
        read, write = state.read, state.write
        assert write != NO_BLOCK, "a step ran without a slot for its state"
        if read not in (write, NO_BLOCK):
            blocks.release(read, self._tree.clock)
        state.set(write, NO_BLOCK)

    def _show(self, table: BlockTable) -> None:
        table.views = tuple([row.ids for row in table.rows])

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

    def _allocate(self, blocks: GroupBlocks) -> int:
        if blocks.pool.num_free == 0:
            self._tree.evict(blocks)
        return blocks.pool.allocate()

    def _retain(self, group: int, block: int) -> None:
        self._blocks[group].retain(block, self._tree.clock)
