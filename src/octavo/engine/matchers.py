"""The matchers of answers that follow a grammar, and their masks, filled while the forward pass runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import ScheduledChunk
from octavo.core.request import Request
from octavo.kernels.base import DrawMasks
from octavo.text.grammar import Matcher, maker_of
from octavo.text.tokenizer import Tokenizer

Masks = NDArray[np.uint32]  # [draws, ceil(vocabulary / 32)]: see DrawMasks


class Matchers:
    """The matchers of all requests that have a grammar. One writer: the ModelRunner."""

    def __init__(self) -> None:
        self._open: dict[str, _Follower] = {}

    def open(self, request: Request, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Begin to follow an answer, if the request has a grammar."""
        if request.grammar is not None:
            matcher = maker_of(request.grammar)(request.grammar, tokenizer, vocab_size)
            self._open[request.request_id] = _Follower(matcher, request.stop_token_ids)

    def close(self, request_ids: Iterable[str]) -> None:
        """These have ended."""
        if self._open:
            for request_id in request_ids:
                self._open.pop(request_id, None)

    def error(self, request_id: str) -> str | None:
        """What the matcher of a request raised, if it has."""
        follower = self._open.get(request_id)
        return None if follower is None else follower.error

    def masks(self, chunks: Sequence[ScheduledChunk]) -> DrawMasks | None:
        """Masks of the draws of these chunks, to be filled while they run. None if no draw has one."""
        if not self._open:
            return None
        masked: list[int] = []
        jobs: list[tuple[_Follower, ScheduledChunk, int]] = []
        draw = 0
        for chunk in chunks:
            count = len(chunk.drawing)
            follower = self._open.get(chunk.request_id)
            if follower is not None and count:
                jobs.append((follower, chunk, len(masked)))
                masked += range(draw, draw + count)
            draw += count

        def fill(rows: Masks) -> None:
            for follower, chunk, first in jobs:
                follower.fill(rows[first : first + len(chunk.drawing)], chunk)

        return DrawMasks(masked, fill) if masked else None


class _Follower:
    """A matcher, and how much of its answer it has accepted: between two steps, no token that may still go."""

    def __init__(self, matcher: Matcher, stop_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._stop_token_ids = stop_token_ids
        self._num_accepted = 0
        self.error: str | None = None

    def fill(self, rows: Masks, chunk: ScheduledChunk) -> None:
        """The masks of a chunk's draws; they stay empty once the matcher has raised."""
        if self.error is None:
            try:
                self._fill(rows, chunk)
            except Exception as error:  # noqa: BLE001 - told to the request
                self.error = f"{type(error).__name__}: {error}"
                rows[:] = 0

    def _fill(self, rows: Masks, chunk: ScheduledChunk) -> None:
        assert chunk.draw is not None
        tokens, begin, first = chunk.draw.history, chunk.draw.prompt_len, chunk.drawing.start + 1
        assert begin + self._num_accepted <= first, "a draw before what the matcher has accepted"
        for token in tokens[begin + self._num_accepted : first]:  # of the last step, or all after known_output
            self._matcher.accept(token)
            self._num_accepted += 1
        self._mask(rows[0])
        ahead = 0
        for position, row, last in zip(range(first, first + len(rows) - 1), rows[1:], rows, strict=False):
            token = tokens[position]
            if token in self._stop_token_ids or not last[token >> 5] >> (token & 31) & 1:
                break  # no draw behind it will count
            self._matcher.accept(token)
            ahead += 1
            self._mask(row)
        if ahead:
            self._matcher.rollback(ahead)

    def _mask(self, row: NDArray[np.uint32]) -> None:
        if self._matcher.has_ended:
            for token in self._stop_token_ids:
                row[token >> 5] |= np.uint32(1 << (token & 31))
            return
        bits = np.frombuffer(self._matcher.allowed(), np.uint32)
        if bits.shape != row.shape:
            raise ValueError(f"its mask has {bits.nbytes} bytes but the vocabulary takes {row.nbytes}")
        row[:] = bits
