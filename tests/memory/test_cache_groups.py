"""What is particular to groups of layers that do not keep everything, one by one."""

from __future__ import annotations

import pytest

from octavo.core.cache_group import FULL, CacheGroup, group_by_window
from octavo.memory.block_table import BlockRow, BlockTable, StateRow
from octavo.memory.kv_cache_manager import KVCacheManager
from octavo.memory.prefix_tree import Match

SIZE = 4
WINDOW = CacheGroup(kind="window", window=6)
STATE = CacheGroup(kind="state", snapshot_blocks=2)


def step(manager: KVCacheManager, table: BlockTable, tokens: list[int], end: int) -> None:
    """Run positions up to ``end``, in chunks as short as states and room ask for."""
    while table.num_computed < end:
        stop = manager.grow(table, manager.cut(table, end))
        assert stop > table.num_computed
        manager.take_copies()
        manager.commit(table, tokens, stop)
        manager.end_step()
        manager.check_integrity()


def run(manager: KVCacheManager, tokens: list[int], prompt_len: int | None = None) -> int:
    """A whole life, what follows the prompt token by token -> the positions that were cached."""
    match = manager.lookup(tokens, len(tokens) - 1)
    table, cached = manager.open(match, tokens[:prompt_len], len(tokens) + SIZE)
    step(manager, table, tokens, prompt_len or len(tokens))
    for end in range(prompt_len or len(tokens), len(tokens)):
        step(manager, table, tokens, end + 1)
    manager.release(table)
    manager.check_integrity()
    return cached


def row(table: BlockTable, group: int) -> BlockRow:
    found = table.rows[group]
    assert isinstance(found, BlockRow)
    return found


def test_layers_alike_in_their_windows_form_a_group_the_widest_first() -> None:
    groups = group_by_window([512, None, 512, 1024])
    assert [(group.name, group.layers) for group in groups] == [
        ("full", (1,)),
        ("window 1024", (3,)),
        ("window 512", (0, 2)),
    ]


def test_a_window_group_holds_its_window_and_gives_back_the_rest() -> None:
    manager = KVCacheManager((16, 16), SIZE, groups=(FULL, WINDOW))
    tokens = list(range(40))
    table, _ = manager.open(Match(reason="off"), tokens, 44)
    for end in range(1, 41):
        step(manager, table, tokens, end)
        held = row(table, 1)
        assert held.first * SIZE <= max(0, end - WINDOW.window), "what position end - 1 sees is gone"
        assert len(held.held) <= WINDOW.blocks_for(40, SIZE) == 4
        assert list(held.ids[: held.first]) == [-1] * held.first
    assert len(row(table, 0).held) == 10


def test_what_a_window_has_left_is_reclaimed_before_anything_that_ended_sooner() -> None:
    manager = KVCacheManager((32, 5), SIZE, groups=(FULL, WINDOW))
    run(manager, [9] * 8)  # two blocks of the window group stay cached
    tokens = list(range(40))
    table, _ = manager.open(manager.lookup(tokens, 39), tokens, 44)
    step(manager, table, tokens, 12)
    assert manager.stats().groups[1].evictions == 0
    step(manager, table, tokens, 16)  # the room comes from what the window has left, two blocks
    step(manager, table, tokens, 20)
    evicted = manager.stats().groups[1].evictions
    assert evicted > 0
    assert manager.lookup([9] * 9, 8).num_tokens == 8, "an older prompt lost its blocks to a window"
    assert manager.stats().groups[0].evictions == 0


def test_a_hit_ends_where_the_window_still_has_what_a_query_there_sees() -> None:
    manager = KVCacheManager((32, 32), SIZE, groups=(FULL, WINDOW))
    tokens = list(range(40))
    run(manager, tokens)
    assert manager.lookup([*tokens, 7], 40).num_tokens == 40
    match = manager.lookup([*tokens[:30], 7, 7], 31)
    assert (match.num_tokens, match.reason) == (30, "diverged"), "blocks that a window has left are still cached"
    assert match.blocks[1][:6] == [-1] * 6
    window = manager._blocks[1]
    for node in list(manager._tree.nodes()):
        if node.depth in (6, 7):
            manager._tree.drop(node, window)
    manager.check_integrity()
    cut = manager.lookup([*tokens[:30], 7, 7], 31)
    assert (cut.num_tokens, cut.reason) == (20, "window given back")
    assert cut.facts == {"position": 30, "group": "window 6"}
    assert manager.lookup([*tokens, 7], 40).num_tokens == 40, "the end of the prompt needs other blocks"


def test_losing_a_window_block_costs_the_full_group_nothing() -> None:
    manager = KVCacheManager((32, 4), SIZE, groups=(FULL, WINDOW))
    tokens = list(range(24))
    run(manager, tokens)
    nodes = manager.stats().nodes
    table, _ = manager.open(Match(reason="off"), [], 16)
    assert manager.grow(table, 16) == 16  # takes all blocks of the window group
    assert manager.stats().nodes == nodes
    assert manager.lookup([*tokens, 7], 24).num_tokens == 0
    manager.release(table)
    assert run(manager, tokens) == 0
    assert run(manager, [*tokens, 7, 8]) == 24, "what was computed again fills the gaps in the tree"


def test_a_fork_that_comes_too_late_cannot_share() -> None:
    manager = KVCacheManager((32, 32), SIZE, groups=(FULL, WINDOW))
    tokens = list(range(30))
    parent, _ = manager.open(Match(reason="off"), tokens[:17], 44)
    step(manager, parent, tokens, 17)
    match = manager.fork(parent, 16)
    assert match is not None
    assert match.blocks[1] == [-1, -1, *row(parent, 1).ids[2:4]]
    step(manager, parent, tokens, 24)
    assert manager.fork(parent, 16) is None
    states = KVCacheManager((32, 4), SIZE, groups=(FULL, STATE))
    other, _ = states.open(Match(reason="off"), tokens[:17], 44)
    step(states, other, tokens, 17)
    assert states.fork(other, 16) is None


def test_a_model_of_windows_alone_forgets_paths_of_which_nothing_is_left() -> None:
    manager = KVCacheManager(6, SIZE, groups=(WINDOW,))
    run(manager, list(range(40)))
    assert manager.stats().nodes == 10
    for start in range(100, 2_000, 100):
        run(manager, list(range(start, start + 40)))
        assert manager.stats().nodes <= 8 * 6 + 10
    table, _ = manager.open(Match(reason="off"), [], 24)
    assert manager.grow(table, 24) == 24
    assert manager.stats().nodes == 0
    manager.check_integrity()


def test_states_are_kept_at_every_second_block_at_the_end_of_the_prompt_and_at_the_latest_block() -> None:
    manager = KVCacheManager((32, 32), SIZE, groups=(FULL, STATE))
    tokens = list(range(35))
    run(manager, tokens, prompt_len=22)
    kept = [node.depth for node in manager._tree.nodes() if node.blocks[1] >= 0]
    assert kept == [2, 4, 5, 6, 8]  # every second, 5 before the prompt's last token; 7 gave way to 8
    for limit, hit in ((34, 32), (31, 24), (23, 20), (19, 16), (15, 8), (7, 0)):
        match = manager.lookup([*tokens[: limit + 1], 99], limit + 1 if limit == 34 else limit)
        assert match.num_tokens == hit, f"of {limit}"
    assert manager.lookup([*tokens[:19], 99, 99], 20).reason == "no snapshot"


def test_a_chunk_that_ends_inside_a_block_leaves_no_state_behind() -> None:
    manager = KVCacheManager((32, 8), SIZE, groups=(FULL, CacheGroup(kind="state", snapshot_blocks=10)))
    tokens = list(range(30))
    table, _ = manager.open(Match(reason="off"), tokens, 40)
    for end in (6, 11, 18):
        assert manager.cut(table, end) == end
        step(manager, table, tokens, end)
        assert [node.depth for node in manager._tree.nodes() if node.blocks[1] >= 0] == []
    step(manager, table, tokens, 30)
    assert [node.depth for node in manager._tree.nodes() if node.blocks[1] >= 0] == [7]


def test_a_shared_state_is_read_and_another_slot_is_written() -> None:
    manager = KVCacheManager((32, 8), SIZE, groups=(FULL, STATE))
    tokens = list(range(17))
    run(manager, tokens)
    tables = [manager.open(manager.lookup(tokens, 16), tokens, 24)[0] for _ in range(2)]
    for table in tables:
        assert manager.grow(table, 17) == 17
    states = [table.rows[1] for table in tables]
    assert all(isinstance(state, StateRow) for state in states)
    first, second = ((state.read, state.write) for state in states if isinstance(state, StateRow))
    assert first[0] == second[0]
    assert len({first[0], first[1], second[1]}) == 3
    manager.check_integrity()
    for table in tables:
        manager.commit(table, tokens, 17)
    assert manager.grow(tables[0], 18) == 18
    (read, write) = tables[0].views[1]
    assert read == write == first[1], "a state that nobody shares is written in place"


def test_without_a_free_slot_a_cached_state_gives_way_and_a_shared_one_stops_the_sequence() -> None:
    manager = KVCacheManager((32, 1), SIZE, groups=(FULL, STATE))
    tokens = list(range(17))
    table, _ = manager.open(Match(reason="off"), tokens, 24)
    step(manager, table, tokens, 17)  # one slot is enough for one sequence: nothing is kept for others
    assert [node.depth for node in manager._tree.nodes() if node.blocks[1] >= 0] == []
    manager.release(table)
    two = KVCacheManager((32, 2), SIZE, groups=(FULL, STATE))
    run(two, tokens)
    one, other = (two.open(two.lookup(tokens, 16), tokens, 24)[0] for _ in range(2))
    assert two.grow(one, 17) == 17
    assert two.grow(other, 17) == 16, "no slot to write, and what it reads is not its own"
    two.release(one)
    assert two.grow(other, 17) == 17
    two.check_integrity()


def test_the_books_are_told_apart_by_group() -> None:
    manager = KVCacheManager((16, 8), SIZE, groups=(FULL, WINDOW))
    run(manager, list(range(24)))
    full, window = manager.stats().groups
    assert (full.name, full.num_blocks, full.free_blocks, full.cached_blocks, full.pinned_blocks) == (
        "full",
        16,
        10,
        6,
        0,
    )
    assert (window.name, window.num_blocks, window.free_blocks, window.cached_blocks) == ("window 6", 8, 2, 6)
    assert manager.num_available == 8
    assert manager.shortage(16 * SIZE) is None
    assert manager.shortage(17 * SIZE) == (17, 16)
    tiny = KVCacheManager((16, 3), SIZE, groups=(FULL, WINDOW))
    assert tiny.shortage(40) == (4, 3)


@pytest.mark.parametrize("damage", ["given back twice", "window block in two nodes", "state leaked"])
def test_integrity_finds_damage(damage: str) -> None:
    manager = KVCacheManager((16, 8, 8), SIZE, groups=(FULL, WINDOW, STATE))
    tokens = list(range(20))
    table, _ = manager.open(Match(reason="off"), tokens, 24)
    step(manager, table, tokens, 20)
    if damage == "given back twice":
        manager._blocks[1].release(row(table, 1).held[0], 0)
    elif damage == "window block in two nodes":
        nodes = list(manager._tree.nodes())
        nodes[-1].blocks[1] = nodes[-2].blocks[1]
    else:
        manager._blocks[2].pool.allocate()
    with pytest.raises(AssertionError):
        manager.check_integrity()
