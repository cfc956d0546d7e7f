"""SentencePiece's byte-pair encoding with scores (Kudo and Richardson 2018, arXiv:1808.06226), for GGUF ``llama``.

The ``tokenizers`` library ranks *pairs*, SentencePiece scores *results* and breaks ties by position. The two differ
where one token can be split in two ways, so this is written out here, exactly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

from octavo.core.limits import MAX_MERGE_CHARS
from octavo.core.steps import Steps
from octavo.text.pre_tokenizers import PIECE_CHARS, cut_at_seam
from octavo.text.space_marks import find_space_marks
from octavo.text.vocabulary import SPACE_MARK

_MAX_CACHED_WORDS = 1 << 15
_MAX_CACHED_CHARS = 32
_PER_STEP = 1 << 10  # merges, or characters, between two yields


class SentencePieceEncoder:
    """Text to ids: merge the neighbours whose joint token scores highest, the leftmost first, until none is a token.

    pieces:    token text -> (id, score); spaces spelt U+2581
    byte_ids:  ids of <0x00> .. <0xFF>, for characters that are no token; or empty
    unknown:   id for them where there are no byte tokens; None drops them
    add_space: put a space before the text, as SentencePiece does

    Safe to call from several threads: the cache of words is only ever read, set or replaced whole.
    """

    def __init__(
        self,
        pieces: Mapping[str, tuple[int, float]],
        byte_ids: Sequence[int],
        unknown: int | None,
        *,
        add_space: bool,
    ) -> None:
        self._pieces = pieces
        self._byte_ids = byte_ids
        self._unknown = unknown
        self._add_space = add_space
        self.max_run: int | None = MAX_MERGE_CHARS
        marks = find_space_marks(pieces)
        self._words = None if marks is None else re.compile(marks.words)
        self._seam = None if marks is None else marks.seam
        self._cache: dict[str, tuple[int, ...]] = {}

    def encode_steps(
        self, texts: Sequence[str], *, at_start: bool = True, goes_on: bool = False
    ) -> Steps[list[list[int]]]:
        """Ids of each text, wherever it stands. Time n log n in the longest word."""
        found: list[list[int]] = []
        for text in texts:
            ids = yield from self._encode(text, add_space=self._add_space and not goes_on)
            found.append(ids)
        return found

    def cut(self, text: str, start: int, size: int) -> int:
        """A place before a space, or the end."""
        return len(text) if self._seam is None else cut_at_seam(text, start, size, self._seam)

    def _encode(self, text: str, *, add_space: bool) -> Steps[list[int]]:
        text = text.replace(" ", SPACE_MARK)
        if add_space:
            text = SPACE_MARK + text
        if self._words is None:
            return (yield from self._merge(text))
        ids: list[int] = []
        for count, word in enumerate(self._words.findall(text)):
            known = self._cache.get(word)
            if known is None:
                known = tuple((yield from self._merge(word)))
                if len(word) <= _MAX_CACHED_CHARS:
                    if len(self._cache) >= _MAX_CACHED_WORDS:
                        self._cache = {}
                    self._cache[word] = known
            ids.extend(known)
            if count % _PER_STEP == 0:
                yield
        return ids

    def _merge(self, word: str) -> Steps[list[int]]:
        """Symbols are a linked list over the word's positions; ``end[p]`` is 0 where no symbol begins any more."""
        pieces, size = self._pieces, len(word)
        end: list[int] = []
        start_before: list[int] = []  # start of the symbol that ends where this one begins
        heap: list[tuple[float, int, int]] = []
        for first in range(0, size, _PER_STEP):
            last = min(first + _PER_STEP, size)
            end += range(first + 1, last + 1)
            start_before += range(first - 1, last - 1)
            heap += [
                (-pieces[pair][1], at, at + 2)
                for at in range(first, min(last, size - 1))
                if (pair := word[at : at + 2]) in pieces
            ]
            if first:
                yield
        if len(heap) <= PIECE_CHARS:
            heapify(heap)
        else:  # which is one call into C
            pushed, heap = heap, []
            for count, item in enumerate(pushed):
                heappush(heap, item)
                if count % _PER_STEP == 0:
                    yield
        num_merged = 0
        while heap:
            num_merged += 1
            if num_merged % _PER_STEP == 0:
                yield
            _, left, stop = heappop(heap)
            middle = end[left]
            # Stale unless both halves are still symbols and together end where they did when this was pushed.
            if not middle or middle >= stop or end[middle] != stop:
                continue
            end[left], end[middle] = stop, 0
            if stop < size:
                start_before[stop] = left
                joined = word[left : end[stop]]
                if joined in pieces:
                    heappush(heap, (-pieces[joined][1], left, end[stop]))
            before = start_before[left]
            if before >= 0:
                joined = word[before:stop]
                if joined in pieces:
                    heappush(heap, (-pieces[joined][1], before, stop))
        return self._ids_of_symbols(word, end)

    def _ids_of_symbols(self, word: str, end: Sequence[int]) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(word):
            symbol = word[at : end[at]]
            at = end[at]
            piece = self._pieces.get(symbol)
            if piece is not None:
                ids.append(piece[0])
            elif self._byte_ids:
                ids.extend(self._byte_ids[byte] for byte in symbol.encode())
            elif self._unknown is not None:
                ids.append(self._unknown)
        return ids
