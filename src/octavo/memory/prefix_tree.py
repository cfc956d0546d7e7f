"""What the cached blocks contain: a trie whose edges are whole blocks of tokens.

```
root(salt) --(t0 .. t15)--> Node, block 7 --(t16 .. t31)--> Node, block 2
                                          \\-(t16 .. t20, u21 .. u31)--> Node, block 9
```
A match compares tokens, so a hash collision cannot give one request another's KV. Hashes serve only to wait for a
block (`hash_of`) and to explain a miss (the ghost ring).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from octavo.core.plan import MissReason
from octavo.memory.block_pool import BlockPool

GHOSTS = 8192  # evicted blocks that a lookup can still name as the reason of its miss
Tokens = tuple[int, ...]


class Node:
    """One cached block. A root stands for the empty prefix under one salt and has block -1."""

    __slots__ = ("alive", "block", "children", "depth", "keys", "last_used", "parent", "path_hash", "salt", "tokens")

    def __init__(self, parent: Node | None, tokens: Tokens, block: int, path_hash: int, salt: bytes) -> None:
        self.parent = parent
        self.salt = salt
        self.tokens = tokens
        self.block = block
        self.path_hash = path_hash
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[Tokens, Node] = {}
        self.keys: list[Tokens] = []  # the children's tokens, sorted
        self.last_used = 0
        self.alive = True  # False once it has left the tree; whoever still points at it must look again

    def nearest(self, tokens: Tokens) -> tuple[Node | None, int]:
        """The child that shares the most leading tokens with ``tokens``, and how many."""
        best: Node | None = None
        longest = -1
        at = bisect_left(self.keys, tokens)
        for key in self.keys[max(0, at - 1) : at + 1]:  # in sorted order the longest common head is a neighbour's
            common = common_head(key, tokens)
            if common > longest:
                best, longest = self.children[key], common
        return best, max(longest, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How far a lookup got, and why it ended."""

    num_tokens: int = 0  # positions [0, num_tokens) need not be computed
    blocks: tuple[int, ...] = ()  # whole blocks to share
    node: Node | None = None  # tree node of the last of them, if they came from the tree
    copy_from: int | None = None  # block whose head holds positions [len(blocks) * block_size, num_tokens)
    reason: MissReason
    facts: dict[str, object] = field(default_factory=dict)
    next_hash: int | None = None  # of the block after ``blocks``, when the sequence has it whole


class PrefixTree:
    """Trie of cached blocks over a ``BlockPool``. The tree holds one reference to each block it contains.

    A block that only the tree holds is *unreferenced*: its content may be lost when somebody needs the room. Eviction
    takes the least recently used unreferenced leaf, so a prefix dies from its tail: a tail without its head is useless.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._roots: dict[bytes, Node] = {}
        self._node_of: list[Node | None] = [None] * pool.num_blocks
        self._clock = 0
        self._pushes = 0
        self._heap: list[tuple[int, int, Node]] = []  # eviction candidates (last_used, tie, node), checked when popped
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._num_at_depth = [0]
        self.num_nodes = 0
        self.num_unreferenced = 0
        self.num_evicted = 0

    @property
    def depth(self) -> int:
        """Blocks on the longest path."""
        return len(self._num_at_depth) - 1

    # Reading

    def find(self, tokens: Sequence[int], limit: int, salt: bytes) -> Match:
        """Longest cached head of ``tokens[:limit]`` under ``salt``; may end inside a block. Changes nothing."""
        size = self._block_size
        node = self._roots.get(salt)
        position = 0
        blocks: list[int] = []
        while node is not None and position + size <= limit:
            child = node.children.get(tuple(tokens[position : position + size]))
            if child is None:
                break
            node = child
            blocks.append(node.block)
            position += size
        tail = tuple(tokens[position : min(position + size, limit)])
        nearest, common = (None, 0) if node is None else node.nearest(tail)
        whole = tuple(tokens[position : position + size])
        parent_hash = hash(salt) if node is None else node.path_hash
        next_hash = hash_of(parent_hash, whole) if len(whole) == size and tail else None
        reason: MissReason
        facts: dict[str, object] = {}
        if position + common == limit:
            reason = "end of prompt"
        elif next_hash in self._ghosts:
            reason = "evicted"
        elif nearest is not None:
            reason = "diverged"
            facts = {"position": position + common, "token": tail[common], "nearest": nearest.tokens[common:][:8]}
        else:
            reason = "never seen"
        return Match(
            num_tokens=position + common,
            blocks=tuple(blocks),
            node=node,
            copy_from=nearest.block if nearest is not None and common else None,
            reason=reason,
            facts=facts,
            next_hash=next_hash,
        )

    def child(self, node: Node | None, tokens: Tokens, salt: bytes) -> Node | None:
        """The node of one more block after ``node`` (None: after the root of ``salt``)."""
        parent = self._roots.get(salt) if node is None else node
        return None if parent is None else parent.children.get(tokens)

    def contains(self, block: int) -> bool:
        return self._node_of[block] is not None

    def nodes(self) -> Iterator[Node]:
        """All nodes with a block, parents before children, children in token order."""
        stack = [root for _, root in sorted(self._roots.items(), reverse=True)]
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children[key] for key in reversed(node.keys))

    # Changing

    def insert(self, node: Node | None, tokens: Tokens, block: int, salt: bytes) -> Node:
        """Add ``block`` as the child of ``node`` (None: of the root). The tree takes its own reference."""
        if node is None:
            node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = Node(None, (), -1, hash(salt), salt)
        child = Node(node, tokens, block, hash_of(node.path_hash, tokens), salt)
        assert tokens not in node.children, "this block is cached already"
        assert self._node_of[block] is None, f"block {block} is cached as something else"
        node.children[tokens] = child
        insort(node.keys, tokens)
        self._node_of[block] = child
        self._pool.retain(block)
        self._ghosts.pop(child.path_hash, None)
        self.num_nodes += 1
        if child.depth == len(self._num_at_depth):
            self._num_at_depth.append(0)
        self._num_at_depth[child.depth] += 1
        child.last_used = self._clock
        return child

    def tick(self) -> None:
        """Advance the clock of "least recently used"."""
        self._clock += 1

    def retained(self, block: int) -> None:
        """To be told that a sequence now also holds ``block``."""
        node = self._node_of[block]
        if node is not None:
            node.last_used = self._clock
            self.num_unreferenced -= self._pool.refs(block) == 2

    def released(self, block: int) -> None:
        """To be told that a sequence let go of ``block``."""
        node = self._node_of[block]
        if node is not None and self._pool.refs(block) == 1:
            self.num_unreferenced += 1
            node.last_used = self._clock
            if not node.children:
                self._push(node)

    def evict(self) -> bool:
        """Give one unreferenced block back to the pool; False if there is none."""
        while self._heap:
            last_used, _, node = heapq.heappop(self._heap)
            if node.alive and node.last_used == last_used and not node.children and self._pool.refs(node.block) == 1:
                self._remove(node)
                return True
        if self.num_unreferenced == 0:
            return False
        # What is left hangs above blocks that sequences computed themselves and hold. Uncache those: their holders
        # keep them and commit them again later. So every unreferenced block can be had, and nothing is locked.
        unreferenced = (n for n in self._node_of if n is not None and self._pool.refs(n.block) == 1)
        self.remove_subtree(max(unreferenced, key=lambda n: (n.depth, -n.last_used)))
        return True

    def remove_subtree(self, top: Node) -> None:
        """Forget ``top`` and all below it. Blocks that sequences hold stay theirs."""
        stack, order = [top], []
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(node.children.values())
        for node in reversed(order):
            self._remove(node)

    def node_of(self, block: int) -> Node | None:
        return self._node_of[block]

    def _remove(self, node: Node) -> None:
        """Take a leaf out of the tree."""
        parent = node.parent
        assert parent is not None
        assert not node.children
        del parent.children[node.tokens]
        del parent.keys[bisect_left(parent.keys, node.tokens)]
        node.alive = False
        self._node_of[node.block] = None
        self.num_nodes -= 1
        self._num_at_depth[node.depth] -= 1
        while self._num_at_depth[-1] == 0 and len(self._num_at_depth) > 1:
            self._num_at_depth.pop()
        if self._pool.release(node.block) == 0:
            self.num_unreferenced -= 1
            self.num_evicted += 1
            self._ghosts[node.path_hash] = None
            if len(self._ghosts) > GHOSTS:
                self._ghosts.popitem(last=False)
        if parent.children:
            return
        if parent.parent is None:
            parent.alive = False
            del self._roots[parent.salt]
        elif self._pool.refs(parent.block) == 1:
            self._push(parent)

    def _push(self, node: Node) -> None:
        self._pushes += 1
        heapq.heappush(self._heap, (node.last_used, self._pushes, node))
        if len(self._heap) > 4 * self.num_nodes + 64:  # most entries are stale
            leaves = [n for n in self._node_of if n is not None and not n.children and self._pool.refs(n.block) == 1]
            self._heap = [(n.last_used, i, n) for i, n in enumerate(leaves)]
            heapq.heapify(self._heap)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` naming what is inconsistent. O(nodes)."""
        evictable = {id(n) for used, _, n in self._heap if n.alive and n.last_used == used}
        seen = unreferenced = 0
        depths = [0] * len(self._num_at_depth)
        for salt, root in self._roots.items():
            assert root.alive, f"the root of salt {salt!r} is dead"
            assert root.children, f"the root of salt {salt!r} is empty"
        for node in self.nodes():
            parent = node.parent
            assert parent is not None
            assert node.alive, f"block {node.block} hangs in the tree but is marked dead"
            assert parent.children.get(node.tokens) is node, f"block {node.block} is not its parent's child"
            assert node.keys == sorted(node.children), f"the children of block {node.block} are out of order"
            assert len(node.tokens) == self._block_size, f"block {node.block} has {len(node.tokens)} tokens"
            assert self._node_of[node.block] is node, f"block {node.block} is in the tree twice"
            assert node.depth == parent.depth + 1, f"block {node.block} has depth {node.depth}"
            refs = self._pool.refs(node.block)
            assert refs >= 1, f"block {node.block} is cached but free"
            if refs == 1:
                unreferenced += 1
                assert node.children or id(node) in evictable, f"block {node.block} can never be evicted"
            seen += 1
            depths[node.depth] += 1
        assert seen == self.num_nodes == sum(n is not None for n in self._node_of), f"{seen} of {self.num_nodes} nodes"
        assert unreferenced == self.num_unreferenced, f"{unreferenced} unreferenced, counted {self.num_unreferenced}"
        assert depths == self._num_at_depth, f"nodes per depth {depths}, counted {self._num_at_depth}"


def hash_of(parent_hash: int, tokens: Tokens) -> int:
    """Hash of a block in its place: of all tokens up to its end, and the salt."""
    return hash((parent_hash, tokens))


def common_head(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading items are equal."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
