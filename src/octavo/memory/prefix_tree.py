"""What the cached blocks contain: a trie whose edges are whole blocks of tokens.

```
root(salt) --(t0 .. t15)--> Node, block 7 --(t16 .. t31)--> Node, block 2
                                          \\-(t16 .. t20, u21 .. u31)--> Node, block 9
```
A match compares tokens, so a hash collision cannot give one request another's KV. Hashes serve only to wait for a
block (`hash_of`) and to explain a miss (the ghost ring).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from octavo.core.plan import MissReason
from octavo.memory.group_blocks import NO_BLOCK, GroupBlocks

GHOSTS = 8192  # evicted blocks that a lookup can still name as the reason of its miss
Tokens = tuple[int, ...]


class Node:
    """One cached block of positions, in each cache group that still has it. A root is the empty prefix of one salt."""

    __slots__ = (
        "alive", "blocks", "children", "depth", "keys", "last_used", "parent", "path_hash", "salt", "tokens"
    )  # fmt: skip

    def __init__(self, parent: Node | None, tokens: Tokens, num_groups: int, path_hash: int, salt: bytes) -> None:
        self.parent = parent
        self.salt = salt
        self.tokens = tokens
        self.blocks = [NO_BLOCK] * num_groups  # of a state group: the slot of the state after the last position
        self.path_hash = path_hash
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[Tokens, Node] = {}
        self.keys: list[Tokens] = []  # the children's tokens, sorted
        self.last_used = [0] * num_groups
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
    whole: int = 0  # blocks of positions among them
    blocks: tuple[
        Sequence[int], ...
    ] = ()  # of each group, to share: one per whole block, NO_BLOCK where none is needed
    node: Node | None = None  # tree node of the last whole block, if they came from the tree
    copy_from: Sequence[int] | None = None  # of each group: whose head holds the positions after the whole blocks
    reason: MissReason
    facts: dict[str, object] = field(default_factory=dict)
    next_hash: int | None = None  # of the block after the last that is cached, if the sequence has it whole


class PrefixTree:
    """Trie of cached blocks over the ``GroupBlocks`` of a model, which it keeps one of each of at most in a node.

    With a full group, a node lives as long as its block of that group; without, as long as it or a descendant has any.
    """

    def __init__(self, groups: Sequence[GroupBlocks], block_size: int) -> None:
        self._groups = groups
        self._full = next((group for group in groups if group.is_full), None)
        self._block_size = block_size
        self._roots: dict[bytes, Node] = {}
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._num_at_depth = [0]
        self.clock = 0  # of "least recently used"
        self.num_nodes = 0

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
        path: list[Node] = []
        while node is not None and position + size <= limit:
            child = node.children.get(tuple(tokens[position : position + size]))
            if child is None:
                break
            node = child
            path.append(node)
            position += size
        tail = tuple(tokens[position : min(position + size, limit)])
        nearest, common = (None, 0) if node is None else node.nearest(tail)
        found = position + common
        whole = tuple(tokens[position : position + size])
        parent_hash = hash(salt) if node is None else node.path_hash
        next_hash = hash_of(parent_hash, whole) if len(whole) == size and found < limit else None
        reason: MissReason
        facts: dict[str, object] = {}
        if found == limit:
            reason = "end of prompt"
        elif next_hash in self._ghosts:
            reason = "evicted"
        elif nearest is not None:
            reason = "diverged"
            facts = {"position": found, "token": tail[common], "nearest": nearest.tokens[common:][:8]}
        else:
            reason = "never seen"
        if len(self._groups) > 1 or self._full is None:
            usable, lacking = self._usable(path, nearest, found)
            if lacking is not None:
                reason = "no snapshot" if lacking.group.kind == "state" else "window given back"
                facts = {"position": found, "group": lacking.group.name}
                nearest, common = (nearest, usable - position) if usable > position else (None, 0)
                del path[usable // size :]
        return Match(
            num_tokens=len(path) * size + common,
            whole=len(path),
            blocks=tuple([self._shared(group, path, common) for group in self._groups]),
            node=path[-1] if path else None,
            copy_from=tuple(nearest.blocks) if nearest is not None and common else None,
            reason=reason,
            facts=facts,
            next_hash=next_hash,
        )

    def child(self, node: Node | None, tokens: Tokens, salt: bytes) -> Node | None:
        """The node of one more block after ``node`` (None: after the root of ``salt``)."""
        parent = self._roots.get(salt) if node is None else node
        return None if parent is None else parent.children.get(tokens)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents before children, children in token order."""
        stack = [root for _, root in sorted(self._roots.items(), reverse=True)]
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children[key] for key in reversed(node.keys))

    def _usable(self, path: Sequence[Node], nearest: Node | None, found: int) -> tuple[int, GroupBlocks | None]:
        """How many of ``found`` positions all groups can honour, and the first group that could not honour them all."""
        size, lacking = self._block_size, None
        usable = [True] * (len(path) + 1)  # at the end of so many blocks
        for group in self._groups:
            if group.is_full:
                continue
            index, run, is_state = group.index, 0, group.group.kind == "state"
            for count, node in enumerate(path, 1):
                run = run + 1 if node.blocks[index] != NO_BLOCK else 0
                if run < (1 if is_state else count - group.first_block(count * size)):
                    usable[count] = False
            if found == len(path) * size:
                honoured = usable[-1]
            else:
                assert nearest is not None
                has_tail = not is_state and nearest.blocks[index] != NO_BLOCK
                honoured = has_tail and run >= len(path) - group.first_block(found)
            if not honoured and lacking is None:
                lacking = group
        if lacking is None:
            return found, None
        return max(count for count, ok in enumerate(usable) if ok) * size, lacking

    def _shared(self, group: GroupBlocks, path: Sequence[Node], common: int) -> Sequence[int]:
        """Blocks of ``group`` that one who goes on after ``path`` and ``common`` more positions reads."""
        index = group.index
        if group.is_full:
            return [node.blocks[index] for node in path]
        if group.group.kind == "state":
            return [path[-1].blocks[index]] if path else []
        first = group.first_block(len(path) * self._block_size + common)
        return [NO_BLOCK] * min(first, len(path)) + [node.blocks[index] for node in path[first:]]

    # Changing

    def insert(self, node: Node | None, tokens: Tokens, salt: bytes) -> Node:
        """A new child of ``node`` (None: of the root), to which the caller attaches its blocks."""
        if node is None:
            node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = Node(None, (), len(self._groups), hash(salt), salt)
        child = Node(node, tokens, len(self._groups), hash_of(node.path_hash, tokens), salt)
        assert tokens not in node.children, "this block is cached already"
        node.children[tokens] = child
        insort(node.keys, tokens)
        self._ghosts.pop(child.path_hash, None)
        self.num_nodes += 1
        if child.depth == len(self._num_at_depth):
            self._num_at_depth.append(0)
        self._num_at_depth[child.depth] += 1
        return child

    def evict(self, group: GroupBlocks) -> bool:
        """Give one unreferenced block of ``group`` back to its pool; False if there is none."""
        node = group.least_recently_used()
        if node is not None:
            self.drop(node, group)
            return True
        if group.num_unreferenced == 0:
            return False
        # What is left hangs above blocks that sequences computed themselves and hold. Uncache those: their holders
        # keep them and commit them again later. So every unreferenced block can be had, and nothing is locked.
        self.remove_subtree(max(group.unreferenced(), key=lambda n: (n.depth, -n.last_used[group.index])))
        return True

    def drop(self, node: Node, group: GroupBlocks) -> None:
        """``node`` gives up its block of one group, and leaves the tree if it is of no more use."""
        if group.is_full:
            self._remove(node)
        else:
            group.detach(node)
            self.prune(node)

    def remove_subtree(self, top: Node) -> None:
        """Forget ``top`` and all below it. Blocks that sequences hold stay theirs."""
        stack, order = [top], []
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(node.children.values())
        for node in reversed(order):
            self._remove(node)
        assert top.parent is not None
        self.prune(top.parent)

    def prune(self, node: Node) -> None:
        """Without a full group: take out ``node``, and what it hangs on, as far as nothing there has a block."""
        while self._full is None and node.alive and not node.children and max(node.blocks) == NO_BLOCK:
            if node.parent is None:
                break
            self._remove(node)
            node = node.parent

    def shrink(self, max_nodes: int) -> None:
        """Without a full group: forget what was used least recently until so many nodes are left, or none can go.

        A path whose early blocks have been given back costs the memory of its tokens all the same.
        """
        for group in () if self._full is not None else self._groups:
            while self.num_nodes > max_nodes and self.evict(group):
                pass

    def _remove(self, node: Node) -> None:
        """Take a leaf out of the tree."""
        parent = node.parent
        assert parent is not None
        assert not node.children
        del parent.children[node.tokens]
        del parent.keys[bisect_left(parent.keys, node.tokens)]
        node.alive = False
        self.num_nodes -= 1
        self._num_at_depth[node.depth] -= 1
        while self._num_at_depth[-1] == 0 and len(self._num_at_depth) > 1:
            self._num_at_depth.pop()
        lost = self._full is None
        for group in self._groups:
            lost |= group.detach(node) and group.is_full
        if lost:
            self._ghosts[node.path_hash] = None
            if len(self._ghosts) > GHOSTS:
                self._ghosts.popitem(last=False)
        if parent.children:
            return
        if parent.parent is None:
            parent.alive = False
            del self._roots[parent.salt]
        elif self._full is not None:
            self._full.offer(parent)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` naming what is inconsistent. O(nodes)."""
        cached = [0] * len(self._groups)
        seen = 0
        depths = [0] * len(self._num_at_depth)
        for salt, root in self._roots.items():
            assert root.alive, f"the root of salt {salt!r} is dead"
            assert root.children, f"the root of salt {salt!r} is empty"
        for node in self.nodes():
            parent, name = node.parent, f"the node of blocks {node.blocks}"
            assert parent is not None
            assert node.alive, f"{name} hangs in the tree but is marked dead"
            assert parent.children.get(node.tokens) is node, f"{name} is not its parent's child"
            assert node.keys == sorted(node.children), f"the children of {name} are out of order"
            assert len(node.tokens) == self._block_size, f"{name} has {len(node.tokens)} tokens"
            assert node.depth == parent.depth + 1, f"{name} has depth {node.depth}"
            if self._full is not None:
                assert node.blocks[self._full.index] != NO_BLOCK, f"{name} has lost what every node must have"
            else:
                assert node.children or max(node.blocks) != NO_BLOCK, f"{name} is of no use"
            for group in self._groups:
                block = node.blocks[group.index]
                cached[group.index] += block != NO_BLOCK
                assert block == NO_BLOCK or group.node_of[block] is node, f"{name} is in the tree twice"
            seen += 1
            depths[node.depth] += 1
        assert seen == self.num_nodes, f"{seen} of {self.num_nodes} nodes"
        assert depths == self._num_at_depth, f"nodes per depth {depths}, counted {self._num_at_depth}"
        for group, count in zip(self._groups, cached, strict=True):
            assert count == group.num_cached, f"{count} of {group.num_cached} cached blocks of group {group.group.name}"
            group.check_integrity()


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
