"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from array import array


class StopStrings:
    """The stop strings of a request, shared by all its sequences, with what is known of how each repeats itself.

    stops: non-empty strings

    Nothing is computed before text asks for it, and then four bytes per character that it came to match: a thousand
    choices with sixteen long stops each cost what one costs. Sequences that share it must be on one thread.
    """

    __slots__ = ("__weakref__", "borders", "firsts", "stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self.stops = tuple(dict.fromkeys(stops))
        self.firsts = frozenset(stop[0] for stop in stops)
        # [stop][k - 1]: length of the longest border of the stop's first k characters (prefix and suffix, but not all)
        self.borders = [array("I", (0,)) for _ in self.stops]

    def border(self, index: int, size: int) -> int:
        """The longest border of the first ``size`` characters of a stop; constant time per character, once."""
        stop, borders = self.stops[index], self.borders[index]
        while len(borders) < size:
            char, length = stop[len(borders)], borders[-1]
            while length and stop[length] != char:
                length = borders[length - 1]
            borders.append(length + (stop[length] == char))
        return borders[size - 1]


class StopMatcher:
    """Finds the first stop string to be complete, whatever pieces the text comes in. One per sequence.

    The sequence ends at the character that completes any stop; of several completed by the same character the longest
    counts, for it began first. Text is held back exactly while it may still turn into a stop: what is held is always
    the longest suffix of the text that is a proper prefix of some stop.

    Each stop is matched as by Knuth, Morris and Pratt (1977, SIAM Journal on Computing 6(2)): time linear in the text.

    include_stop: release the matched stop with the text before it

    ``num_released`` is the number of characters released so far, ``held`` of those held back.
    """

    __slots__ = ("_firsts", "_include", "_pending", "_sizes", "_strings", "matched", "num_released")

    def __init__(self, strings: StopStrings, *, include_stop: bool = False) -> None:
        self._strings = strings
        self._firsts = strings.firsts
        self._include = include_stop
        self._sizes = [0] * len(strings.stops)  # so many characters of each stop end the text so far
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
        if not self._pending and self._firsts.isdisjoint(text):
            self.num_released += len(text)
            return text, None
        known, sizes, held = self._pending + text, self._sizes, 0
        best_end, best = len(text) + 1, ""
        for index, stop in enumerate(self._strings.stops):
            if not sizes[index] and stop[0] not in text:
                continue
            end, size = self._match(index, sizes[index], text)
            if size == len(stop):
                if (end, -size) < (best_end, -len(best)):
                    best_end, best = end, stop
                continue
            sizes[index] = size
            if size > held:
                held = size
        if best:
            end = len(self._pending) + best_end
            self.matched, self._pending = best, ""
            return self._release(known[: end if self._include else end - len(best)]), best
        cut = len(known) - held
        self._pending = known[cut:]
        return self._release(known[:cut]), None

    def flush(self) -> str:
        """The sequence ended otherwise: what was held back."""
        text, self._pending, self._sizes = self._pending, "", [0] * len(self._sizes)
        return self._release(text)

    def _match(self, index: int, size: int, text: str) -> tuple[int, int]:
        """Go on from the first ``size`` characters of a stop; returns where in ``text`` it ended and with how many."""
        stop, border = self._strings.stops[index], self._strings.border
        at, end = 0, len(text)
        while at < end:
            if not size:
                at = text.find(stop[0], at)
                if at < 0:
                    return end, 0
            elif text[at] != stop[size]:
                size = border(index, size)
                continue
            at += 1
            size += 1
            if size == len(stop):
                break
        return at, size

    def _release(self, text: str) -> str:
        self.num_released += len(text)
        return text
