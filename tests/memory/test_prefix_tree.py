"""The tree against the obvious model: a set of token prefixes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.core.cache_group import FULL
from octavo.memory import prefix_tree
from octavo.memory.group_blocks import GroupBlocks
from octavo.memory.prefix_tree import Node, PrefixTree, common_head

SIZE = 3
TOKENS = st.lists(st.integers(0, 2), max_size=13)
SALTS = st.sampled_from([b"", b"a"])


def add(tree: PrefixTree, group: GroupBlocks, tokens: list[int], salt: bytes = b"") -> list[int]:
    """Cache the whole blocks of ``tokens`` as a sequence that has ended -> their blocks."""
    node: Node | None = None
    blocks = []
    tree.clock += 1
    for i in range(len(tokens) // SIZE):
        key = tuple(tokens[i * SIZE : (i + 1) * SIZE])
        child = tree.child(node, key, salt)
        if child is None:
            block = group.pool.allocate()
            child = tree.insert(node, key, salt)
            group.attach(child, block, tree.clock)
            group.release(block, tree.clock)
        node = child
        blocks.append(child.blocks[0])
    return blocks


def longest_head(cached: set[tuple[bytes, tuple[int, ...]]], tokens: list[int], salt: bytes) -> int:
    return max((common_head(path, tokens) for other, path in cached if other == salt), default=0)


class TreeMachine(RuleBasedStateMachine):
    """Prefixes are cached, found, held, let go and evicted in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.tree, self.group = make_tree(12)
        self.held: list[tuple[int, ...]] = []

    def cached(self) -> set[tuple[bytes, tuple[int, ...]]]:
        paths = set()
        for node in self.tree.nodes():
            path, at = (), node
            while at.parent is not None:
                path, at = at.tokens + path, at.parent
            paths.add((node.salt, path))
        return paths

    @rule(tokens=TOKENS, salt=SALTS)
    def cache(self, tokens: list[int], salt: bytes) -> None:
        needed = len(tokens) // SIZE
        while self.group.pool.num_free < needed:
            if not self.tree.evict(self.group):
                return
        before = self.cached()
        add(self.tree, self.group, tokens, salt)
        heads = {(salt, tuple(tokens[: i * SIZE])) for i in range(1, needed + 1)}
        assert self.cached() == before | heads

    @rule(tokens=TOKENS.filter(bool), salt=SALTS, cut=st.integers(0, 13))
    def find(self, tokens: list[int], salt: bytes, cut: int) -> None:
        limit = min(cut, len(tokens))
        match = self.tree.find(tokens, limit, salt)
        assert match.num_tokens == longest_head(self.cached(), tokens[:limit], salt)
        (blocks,) = match.blocks
        assert len(blocks) == match.whole == match.num_tokens // SIZE
        assert (match.copy_from is not None) == (match.num_tokens % SIZE > 0)
        assert (match.reason == "end of prompt") == (match.num_tokens == limit)
        held = [node for node in self.tree.nodes() if node.blocks[0] in blocks]
        assert sorted(blocks, key=lambda b: self.group.node_of[b].depth) == list(blocks)  # type: ignore[union-attr]
        assert len(held) == len(blocks)

    @rule(tokens=TOKENS.filter(bool), salt=SALTS)
    def hold(self, tokens: list[int], salt: bytes) -> None:
        match = self.tree.find(tokens, len(tokens), salt)
        self.tree.clock += 1
        for block in match.blocks[0]:
            self.group.retain(block, self.tree.clock)
        self.held.append(tuple(match.blocks[0]))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.tree.clock += 1
        for block in reversed(blocks):
            self.group.release(block, self.tree.clock)

    @rule()
    def evict(self) -> None:
        pinned = {block for blocks in self.held for block in blocks}
        before, free = self.cached(), self.group.pool.num_free
        done = self.tree.evict(self.group)
        assert done == (len(before) > len(pinned))
        assert self.group.pool.num_free == free + done
        gone = before - self.cached()
        assert len(gone) == done
        leaves = {path for path in before if not any(o[0] == path[0] and o[1][:-SIZE] == path[1] for o in before)}
        assert gone <= leaves, "a prefix was evicted before what hangs on it"

    @invariant()
    def is_consistent(self) -> None:
        self.tree.check_integrity()
        held = {block for blocks in self.held for block in blocks}
        assert all(self.group.node_of[block] for block in held), "a held block was evicted"
        assert self.group.num_unreferenced == self.tree.num_nodes - len(held)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def make_tree(num_blocks: int = 20) -> tuple[PrefixTree, GroupBlocks]:
    group = GroupBlocks(FULL, 0, num_blocks, SIZE)
    return PrefixTree([group], SIZE), group


def test_the_least_recently_used_prefix_dies_first_and_from_its_tail() -> None:
    tree, group = make_tree()
    a = add(tree, group, [1, 1, 1, 2, 2, 2, 3, 3, 3])
    b = add(tree, group, [5, 5, 5, 6, 6, 6])
    order = []
    for _ in range(5):
        assert tree.evict(group)
        order.append(group.pool._free[-1])
    assert order == [a[2], a[1], a[0], b[1], b[0]]
    assert not tree.evict(group)


def test_above_a_block_that_is_held_the_deepest_gives_way_alone() -> None:
    tree, group = make_tree()
    a, b, c = add(tree, group, [1, 1, 1, 2, 2, 2, 3, 3, 3])
    group.retain(c, tree.clock)
    assert tree.evict(group)
    tree.check_integrity()
    assert [group.node_of[block] is not None for block in (a, b, c)] == [True, False, False]
    assert group.pool.refs(c) == 1, "whoever holds it keeps it"


def test_the_memory_of_what_was_evicted_is_bounded_and_of_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "GHOSTS", 3)
    tree, group = make_tree()
    for i in range(5):
        add(tree, group, [i] * SIZE)
        assert tree.evict(group)
        assert len(tree._ghosts) == min(i + 1, 3)
    reasons = [tree.find([i] * SIZE, SIZE, b"").reason for i in range(5)]
    assert reasons == ["never seen"] * 2 + ["evicted"] * 3


def test_using_a_prefix_again_makes_it_recent() -> None:
    tree, group = make_tree()
    a, b = add(tree, group, [1, 1, 1]), add(tree, group, [5, 5, 5])
    tree.clock += 1
    group.retain(a[0], tree.clock)
    tree.clock += 1
    group.release(a[0], tree.clock)
    tree.evict(group)
    assert group.node_of[a[0]]
    assert not group.node_of[b[0]]


def test_a_prefix_used_a_thousand_times_leaves_the_order_right_and_the_heap_small() -> None:
    tree, group = make_tree(4)
    (never,), (often,), (once,), (last,) = (add(tree, group, [i] * SIZE) for i in range(4))
    for block in [often] * 1_000 + [once, often, last]:
        tree.clock += 1
        group.retain(block, tree.clock)
        group.release(block, tree.clock)
        assert len(group._heap) <= 4 * 4 + 64
    tree.check_integrity()
    for block in (never, once, often, last):
        assert group.node_of[block]
        assert tree.evict(group)
        assert not group.node_of[block]


def test_prefixes_used_in_any_order_are_evicted_in_that_of_their_last_use() -> None:
    rng = random.Random(0)
    tree, group = make_tree(20)
    blocks = [add(tree, group, [i] * SIZE)[0] for i in range(20)]
    last_use, size = dict.fromkeys(blocks, 0), 0
    while len(group._heap) >= size:  # until it is built anew, without what is stale
        size = len(group._heap)
        tree.clock += 1
        block = rng.choice(blocks)
        last_use[block] = tree.clock
        group.retain(block, tree.clock)
        group.release(block, tree.clock)
    assert all(last_use.values())
    for block in sorted(blocks, key=last_use.__getitem__):
        assert tree.evict(group)
        assert not group.node_of[block]


def test_a_lookup_says_why_it_ended() -> None:
    tree, group = make_tree(3)
    add(tree, group, [1, 2, 3, 4, 5, 6])
    find = tree.find
    assert find([1, 2, 3, 4, 5, 6, 7], 6, b"").reason == "end of prompt"
    assert find([1, 2, 3, 4, 5, 9], 5, b"").reason == "end of prompt"
    other = find([1, 2, 3, 4, 8, 6, 7], 6, b"")
    assert (other.reason, other.num_tokens) == ("diverged", 4)
    assert other.facts == {"position": 4, "token": 8, "nearest": (5, 6)}
    assert find([1, 2, 3, 4, 5, 6, 7, 8], 7, b"").reason == "never seen"
    assert find([1, 2, 3], 2, b"salt").reason == "never seen"
    add(tree, group, [9, 9, 9])
    tree.evict(group)
    gone = find([1, 2, 3, 4, 5, 6, 7], 6, b"")
    assert (gone.reason, gone.num_tokens) == ("evicted", 3)


def test_a_salt_hides_everything_cached_under_another() -> None:
    tree, group = make_tree()
    add(tree, group, [1, 2, 3, 4, 5, 6], b"alice")
    assert tree.find([1, 2, 3, 4, 5, 6, 7], 6, b"alice").num_tokens == 6
    assert tree.find([1, 2, 3, 4, 5, 6, 7], 6, b"bob").num_tokens == 0
    assert tree.find([1, 2, 3, 4, 5, 6, 7], 6, b"").num_tokens == 0


def test_forgotten_salts_leave_nothing_behind() -> None:
    tree, group = make_tree(4)
    for i in range(100):
        if not group.pool.num_free:
            tree.evict(group)
        add(tree, group, [1, 2, 3], str(i).encode())
    tree.check_integrity()
    assert len(tree._roots) == 4


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=SIZE, max_size=SIZE), max_size=8), st.lists(st.integers(0, 3)))
def test_the_nearest_child_shares_the_longest_head(children: list[list[int]], wanted: list[int]) -> None:
    tree, group = make_tree()
    for tokens in children:
        add(tree, group, tokens)
    wanted = wanted[:SIZE]
    best = max((common_head(tokens, wanted) for tokens in children), default=0)
    assert tree.find([*wanted, 0], len(wanted), b"").num_tokens == best


def test_the_tree_counts_its_depth() -> None:
    tree, group = make_tree()
    assert tree.depth == 0
    add(tree, group, [1, 1, 1, 2, 2, 2, 3, 3, 3])
    add(tree, group, [4, 4, 4])
    assert tree.depth == 3
    tree.evict(group)
    assert tree.depth == 2
    while tree.evict(group):
        pass
    assert tree.depth == 0


@pytest.mark.parametrize("damage", ["order", "count", "depth", "dead"])
def test_integrity_finds_damage(damage: str) -> None:
    tree, group = make_tree()
    blocks = add(tree, group, [1, 1, 1, 2, 2, 2])
    add(tree, group, [1, 1, 1, 3, 3, 3])
    node = group.node_of[blocks[0]]
    assert node is not None
    if damage == "order":
        node.keys.reverse()
    elif damage == "count":
        group.num_unreferenced += 1
    elif damage == "depth":
        node.depth = 7
    else:
        node.alive = False
    with pytest.raises(AssertionError):
        tree.check_integrity()
