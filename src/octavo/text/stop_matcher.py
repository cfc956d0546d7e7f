"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections import deque


class StopMatcher:
    """Finds the first stop string to be complete, whatever pieces the text comes in. One per sequence.

    The sequence ends at the character that completes any stop; of several completed by the same character the longest
    counts, for it began first. Text is held back exactly while it may still turn into a stop: what is held is always
    the longest suffix of the text that is a proper prefix of some stop.

    This is the automaton of Aho and Corasick (1975, Communications of the ACM 18(6)): time linear in the text, however
    many stops there are.

    stops:        non-empty strings
    include_stop: release the matched stop with the text before it

    ``num_released`` is the number of characters released so far, ``held`` of those held back.
    """

    __slots__ = (
        "_depth",
        "_fail",
        "_firsts",
        "_goto",
        "_include",
        "_match",
        "_node",
        "_pending",
        "matched",
        "num_released",
    )

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._include = include_stop
        self._firsts = frozenset(stop[0] for stop in stops)
        self._goto: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fail = [0]
        self._match: list[str | None] = [None]  # the longest stop that ends at this node
        for stop in stops:
            self._insert(stop)
        self._link()
        self._node = 0
        self._pending = ""
        self.matched: str | None = None
        self.num_released = 0

    @property
    def held(self) -> int:
        """Characters held back."""
        return len(self._pending)

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that may be released, and the stop that it ran into, if it did. After a stop nothing is released."""
        if self.matched is not None:
            return "", self.matched
        if not self._node and self._firsts.isdisjoint(text):
            self.num_released += len(text)
            return text, None
        goto, fail, match, node = self._goto, self._fail, self._match, self._node
        known = self._pending + text
        for end, char in enumerate(text, len(self._pending) + 1):
            while node and char not in goto[node]:
                node = fail[node]
            node = goto[node].get(char, 0)
            stop = match[node]
            if stop is not None:
                self.matched, self._pending = stop, ""
                return self._release(known[: end if self._include else end - len(stop)]), stop
        self._node = node
        cut = len(known) - self._depth[node]
        self._pending = known[cut:]
        return self._release(known[:cut]), None

    def flush(self) -> str:
        """The sequence ended otherwise: what was held back."""
        text, self._pending, self._node = self._pending, "", 0
        return self._release(text)

    def _release(self, text: str) -> str:
        self.num_released += len(text)
        return text

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            child = self._goto[node].get(char)
            if child is None:
                child = self._goto[node][char] = len(self._goto)
                self._goto.append({})
                self._depth.append(self._depth[node] + 1)
                self._fail.append(0)
                self._match.append(None)
            node = child
        self._match[node] = stop

    def _link(self) -> None:
        """Failure links, breadth first: the longest proper suffix of a node's string that is a node too."""
        queue = deque(self._goto[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._goto[node].items():
                fallback = self._fail[node]
                while fallback and char not in self._goto[fallback]:
                    fallback = self._fail[fallback]
                self._fail[child] = self._goto[fallback].get(char, 0)
                if self._match[child] is None:
                    self._match[child] = self._match[self._fail[child]]
                queue.append(child)
