"""The manager's contracts, one by one."""

from __future__ import annotations

import pytest

from octavo.memory.block_table import BlockRow, BlockTable
from octavo.memory.kv_cache_manager import KVCacheManager
from octavo.memory.prefix_tree import Match

SIZE = 4


def start(manager: KVCacheManager, tokens: list[int], *, limit: int | None = None, salt: bytes = b"") -> BlockTable:
    """A sequence that looks up ``tokens``, and gets room for all of them."""
    match = manager.lookup(tokens, len(tokens) - 1 if limit is None else limit, salt)
    table, _ = manager.open(match, tokens, len(tokens) + 8, salt)
    assert manager.grow(table, len(tokens)) == len(tokens)
    manager.take_copies()
    return table


def run(manager: KVCacheManager, tokens: list[int], **more: object) -> list[int]:
    """A whole life: start, compute all, end -> the blocks it used."""
    table = start(manager, tokens, **more)  # type: ignore[arg-type]
    manager.commit(table, tokens, len(tokens))
    manager.end_step()
    blocks = table.to_list()
    manager.release(table)
    manager.check_integrity()
    return blocks


def test_a_second_sequence_shares_whole_blocks_and_copies_the_rest() -> None:
    manager = KVCacheManager(16, SIZE)
    first = run(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    match = manager.lookup([1, 2, 3, 4, 5, 6, 0, 0, 0], 8)
    assert (match.num_tokens, match.blocks, match.copy_from) == (6, ([first[0]],), (first[1],))
    table, cached = manager.open(match, [1, 2, 3, 4, 5, 6, 0, 0, 0], 20)
    assert cached == 6
    assert table.to_list()[0] == first[0]
    assert table.to_list()[1] != first[1]
    assert manager.take_copies() == ((0, first[1], table.to_list()[1], 2),)
    assert manager.take_copies() == ()
    manager.check_integrity()
    manager.end_step()
    manager.release(table)
    manager.check_integrity()


def test_the_source_of_a_copy_cannot_be_evicted_before_the_step_has_run() -> None:
    manager = KVCacheManager(4, SIZE)
    run(manager, [1, 2, 3, 4])
    match = manager.lookup([1, 2, 0, 0, 0], 4)
    table, cached = manager.open(match, [1, 2, 0, 0, 0], 16)
    assert cached == 2
    assert manager.grow(table, 16) == 12  # the source is the fourth block
    assert match.copy_from is not None
    assert match.copy_from[0] not in table.to_list()
    manager.take_copies()
    manager.end_step()
    assert manager.grow(table, 16) == 16


def test_a_copy_that_would_leave_no_room_is_left_out() -> None:
    manager = KVCacheManager(1, SIZE)
    run(manager, [1, 2, 3, 4])
    match = manager.lookup([1, 2, 3, 9], 3)
    assert match.num_tokens == 3
    assert manager.fits(match, 4, manager.room_beside([]))
    table, cached = manager.open(match, [1, 2, 3, 9], 4)
    assert cached == 0
    assert manager.grow(table, 4) == 4
    manager.check_integrity()


def test_a_copy_may_take_the_last_block() -> None:
    manager = KVCacheManager(2, SIZE)
    (source,) = run(manager, [1, 2, 3, 4])
    table, cached = manager.open(manager.lookup([1, 2, 9], 2), [1, 2, 9], 4)
    assert cached == 2
    assert manager.take_copies() == ((0, source, table.to_list()[0], 2),)


def test_nothing_planned_survives_that_the_books_begin_again() -> None:
    manager = KVCacheManager(8, SIZE)
    run(manager, [1, 2, 3, 4])
    table, cached = manager.open(manager.lookup([1, 2, 9, 9, 9], 4), [1, 2, 9, 9, 9], 8)
    assert cached == 2
    assert table.in_flight
    waited_for = table.in_flight[0]
    manager.clear()
    assert manager.take_copies() == ()
    assert not manager.is_in_flight(waited_for)
    assert manager.num_available == 8
    manager.end_step()
    manager.check_integrity()
    assert run(manager, [1, 2, 3, 4, 5])


def test_releasing_a_table_drops_the_copies_planned_into_it() -> None:
    manager = KVCacheManager(8, SIZE)
    run(manager, [1, 2, 3, 4])
    table, _ = manager.open(manager.lookup([1, 2, 0, 0], 3), [1, 2, 0, 0], 4)
    manager.release(table)
    assert manager.take_copies() == ()
    manager.end_step()
    manager.check_integrity()
    assert manager.num_available == 8


def test_what_is_cached_already_keeps_its_node_and_the_twin_stays_private() -> None:
    manager = KVCacheManager(8, SIZE)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    a, b = start(manager, tokens), start(manager, tokens)
    manager.commit(a, tokens, 8)
    manager.commit(b, tokens, 8)
    manager.check_integrity()
    assert set(a.to_list()) & set(b.to_list()) == set()
    manager.release(b)
    assert manager.stats().free_blocks == 6
    manager.release(a)
    assert (manager.stats().free_blocks, manager.stats().cached_blocks) == (6, 2)


def test_no_block_stays_locked_behind_a_twin() -> None:
    manager = KVCacheManager(6, SIZE)
    tokens = list(range(16))
    a, b = start(manager, tokens[:4]), start(manager, tokens[:4])
    manager.commit(a, tokens, 4)
    manager.commit(b, tokens, 4)  # b's first block is a twin of a's ...
    manager.grow(b, 8)
    manager.commit(b, tokens, 8)  # ... and its second hangs below a's
    manager.release(a)
    assert manager.stats().cached_blocks == 1  # a's block: idle, but not a leaf
    assert manager.num_available == 4
    other, _ = manager.open(Match(reason="off"), [], 16)
    assert manager.grow(other, 16) == 16  # takes all four
    manager.check_integrity()
    assert manager.stats().nodes == 0
    manager.release(other)
    manager.grow(b, 12)
    manager.commit(b, tokens, 12)  # b walks its path again and caches all of it
    manager.check_integrity()
    manager.release(b)
    assert manager.lookup([*tokens[:12], 0], 12).num_tokens == 12


def test_blocks_being_computed_are_announced_until_they_are_cached_or_given_up() -> None:
    manager = KVCacheManager(16, SIZE)
    tokens = list(range(10))
    table = start(manager, tokens)
    waiting = manager.lookup([*tokens[:9], 77], 9)
    assert waiting.reason == "in flight"
    assert manager.is_in_flight(waiting.next_hash)
    manager.commit(table, tokens, 4)
    assert not manager.is_in_flight(waiting.next_hash)
    second = manager.lookup([*tokens[:9], 77], 9)
    assert (second.reason, second.num_tokens) == ("in flight", 4)
    manager.release(table)
    assert not manager.is_in_flight(second.next_hash)
    assert manager.lookup([*tokens[:9], 77], 9).reason == "never seen"
    manager.check_integrity()


def test_under_another_salt_nothing_is_in_flight() -> None:
    manager = KVCacheManager(16, SIZE)
    start(manager, list(range(10)), salt=b"alice")
    assert manager.lookup(list(range(10)), 9, b"alice").reason == "in flight"
    assert manager.lookup(list(range(10)), 9, b"bob").reason == "never seen"


def test_suspect_blocks_leave_the_cache() -> None:
    manager = KVCacheManager(16, SIZE)
    run(manager, [1, 2, 3, 4])
    table = start(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    manager.commit(table, [1, 2, 3, 4, 5, 6, 7, 8, 9], 9)
    manager.release(table, suspect=True)
    assert manager.stats().nodes == 0
    assert manager.stats().free_blocks == 16
    manager.check_integrity()


def test_a_fork_shares_whole_blocks_and_copies_the_begun_one() -> None:
    manager = KVCacheManager(16, SIZE)
    tokens = list(range(7))
    parent = start(manager, tokens)
    manager.commit(parent, tokens, 6)
    match = manager.fork(parent, 6)
    assert match is not None
    child, cached = manager.open(match, tokens, 20)
    assert cached == 6
    assert child.to_list()[0] == parent.to_list()[0]
    assert manager.take_copies() == ((0, parent.to_list()[1], child.to_list()[1], 2),)
    manager.release(parent)  # the copy's source survives its owner until the step has run
    manager.check_integrity()
    free = manager.stats().free_blocks
    manager.end_step()
    assert manager.stats().free_blocks == free + 1
    manager.check_integrity()


def test_without_prefix_caching_nothing_is_kept() -> None:
    manager = KVCacheManager(8, SIZE, enable_prefix_caching=False)
    run(manager, list(range(12)))
    assert manager.stats().free_blocks == 8
    assert manager.lookup(list(range(12)), 11).reason == "off"


def test_a_block_table_is_seen_through_views_that_do_not_move() -> None:
    manager = KVCacheManager(8, SIZE)
    table, _ = manager.open(Match(reason="off"), [], 16)
    manager.grow(table, 5)
    (view,) = table.views
    assert list(view) == table.to_list()
    manager.grow(table, 16)
    (longer,) = table.views
    assert list(longer) == table.to_list()
    assert len(longer) == 4
    assert isinstance(view, memoryview)
    assert view.format == "i"
    assert view.itemsize == 4
    assert view.tolist() == table.to_list()[:2]
    (row,) = table.rows
    assert isinstance(row, BlockRow)
    with pytest.raises(IndexError):
        row.append(0)
    manager.release(table)
    assert len(table.views) == len(table) == 0


def test_stats_count_blocks_and_lookups() -> None:
    manager = KVCacheManager(8, SIZE)
    run(manager, list(range(8)))
    table = start(manager, list(range(9)))
    manager.count_lookup(8, 8)
    manager.count_lookup(8, 0)
    manager.count_lookup(8, 1)
    stats = manager.stats()
    assert (stats.num_blocks, stats.free_blocks, stats.cached_blocks, stats.pinned_blocks) == (8, 5, 0, 3)
    assert (stats.nodes, stats.depth, stats.evictions) == (2, 2, 0)
    assert (stats.lookups, stats.hits, stats.misses, stats.hit_tokens, stats.lookup_tokens) == (3, 2, 1, 9, 24)
    manager.release(table)


@pytest.mark.parametrize("damage", ["leak", "shared write", "cached write", "waits for nobody"])
def test_integrity_finds_damage(damage: str) -> None:
    manager = KVCacheManager(8, SIZE)
    tokens = list(range(8))
    table, other = start(manager, tokens), start(manager, [7, 7])
    if damage == "leak":
        manager._blocks[0].pool.retain(table.to_list()[0])
    elif damage == "shared write":
        other.rows[0].ids[0] = table.to_list()[0]  # type: ignore[index]
    elif damage == "cached write":
        manager.commit(table, tokens, 8)
        table.num_full = 1
        table.num_committed = 1
    else:
        manager.release(table)
        manager._in_flight[5] = table
    with pytest.raises(AssertionError):
        manager.check_integrity()


def test_what_was_let_go_last_is_evicted_last() -> None:
    """Not what was computed last: a long answer's blocks are fresh when it ends."""
    manager = KVCacheManager(4, SIZE)
    long = start(manager, [1, 2, 3, 4])
    manager.commit(long, [1, 2, 3, 4], 4)
    (brief,) = run(manager, [5, 6, 7, 8])  # begins later, ends sooner
    manager.release(long)
    table, _ = manager.open(manager.lookup([9] * 12, 11), [9] * 12, 12)
    manager.grow(table, 12)
    assert brief in table.to_list()
    assert manager.lookup([1, 2, 3, 4, 0], 4).num_tokens == 4
    assert manager.lookup([5, 6, 7, 8, 0], 4).num_tokens == 0
