"""The outputs of one call on their way to its reader, and what is done about readers that do not come for them."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from octavo.core.errors import ReaderTooSlow
from octavo.core.limits import MAX_UNREAD_BYTES, MAX_UNREAD_TOTAL_BYTES
from octavo.core.output import RequestOutput, join_outputs

#: So many outputs that nobody has come for are joined, one per choice. A reader that keeps up never has as many.
JOIN_OUTPUTS = 64
#: Bytes of a token id; of a token's logprob; of each alternative to it. Measured with tracemalloc.
TOKEN_BYTES, LOGPROB_BYTES, ALTERNATIVE_BYTES = 40, 160, 120


class RequestStream(AsyncIterator[list[RequestOutput]]):
    """The outputs of one call, as lists of what is new, for one reader. Ends when all its sequences have ended.

    Leaving early aborts: call ``abort()`` or ``aclose()`` (``async with contextlib.aclosing(stream)``). A reader that
    lets more than ``MAX_UNREAD_BYTES`` gather is given up: its sequences end and it gets ReaderTooSlow.
    """

    def __init__(self, request_ids: Sequence[str], *, abort: Callable[[str], None], unread: Unread) -> None:
        """abort: ends one sequence in the engine; unread: shared by all streams of the engine."""
        self._abort = abort
        self._unread = unread
        self._open = set(request_ids)
        self._backlog: deque[tuple[list[RequestOutput], int]] = deque()  # joined outputs and their bytes, oldest first
        self._pending: list[RequestOutput] = []  # later ones
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None  # what the reader awaits (an Event costs three times as much)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[RequestOutput]:
        while True:
            if self._backlog:
                await asyncio.sleep(0)  # a breath for the event loop: each piece becomes up to 64 tokens of JSON
                if self._backlog:
                    outputs, num_bytes = self._backlog.popleft()
                    self._unread.remove(self, num_bytes)
                    return outputs
            elif self._pending:
                pending, self._pending = self._pending, []
                return pending
            elif self._error is not None:
                raise self._error
            elif not self._open:
                raise StopAsyncIteration
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter

    def abort(self) -> None:
        """End all sequences that still run; their blocks come back before the next step. Safe to call twice."""
        for request_id in tuple(self._open):
            self._abort(request_id)
        self._open.clear()
        self._forget()
        self._wake_reader()

    async def aclose(self) -> None:
        self.abort()

    def deliver(self, output: RequestOutput) -> None:
        """Add what is new of one sequence."""
        self._pending.append(output)
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
        if len(self._pending) >= JOIN_OUTPUTS:
            self._set_aside()
        self._wake_reader()

    def fail(self, error: BaseException) -> None:
        """End with ``error``, after what has been delivered."""
        self._error = error
        self._open.clear()
        self._wake_reader()

    def give_up(self, num_bytes: int, limit: int) -> None:
        """End with ReaderTooSlow, at once."""
        self.abort()
        self.fail(
            ReaderTooSlow(
                f"{num_bytes} bytes of output were not read and the limit is {limit}: the request was aborted; "
                "read faster, or ask for fewer logprobs"
            )
        )

    def _set_aside(self) -> None:
        by_sequence: dict[str, list[RequestOutput]] = {}
        for output in self._pending:
            by_sequence.setdefault(output.request_id, []).append(output)
        self._pending = []
        joined = [join_outputs(outputs) for outputs in by_sequence.values()]
        num_bytes = sum(map(_num_bytes, joined))
        self._backlog.append((joined, num_bytes))
        self._unread.add(self, num_bytes)

    def _forget(self) -> None:
        self._unread.remove(self, sum(num_bytes for _, num_bytes in self._backlog))
        self._backlog.clear()
        self._pending = []

    def _wake_reader(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Unread:
    """Bytes that the readers of all streams have not come for, kept within bounds."""

    def __init__(self, *, limit: int = MAX_UNREAD_BYTES, total_limit: int = MAX_UNREAD_TOTAL_BYTES) -> None:
        self._limit = limit  # of one stream
        self._total_limit = total_limit
        self._of: dict[RequestStream, int] = {}
        self.total = 0

    def add(self, stream: RequestStream, num_bytes: int) -> None:
        """Count, and give up ``stream`` if it has too many, or the one with the most if all have."""
        self._of[stream] = self._of.get(stream, 0) + num_bytes
        self.total += num_bytes
        if self._of[stream] > self._limit:
            stream.give_up(self._of[stream], self._limit)
        while self.total > self._total_limit:
            largest = max(self._of, key=self._of.__getitem__)
            largest.give_up(self.total, self._total_limit)

    def remove(self, stream: RequestStream, num_bytes: int) -> None:
        """``num_bytes`` of what ``stream`` had have been read, or dropped."""
        left = self._of.pop(stream, 0) - num_bytes
        self.total -= num_bytes
        if left > 0:
            self._of[stream] = left


def _num_bytes(output: RequestOutput) -> int:
    """What an output takes in memory, about."""
    tokens = (*(output.logprobs or ()), *(output.prompt_logprobs or ()))
    alternatives = sum(len(token.top) for token in tokens)
    return (
        sys.getsizeof(output.text)
        + TOKEN_BYTES * len(output.token_ids)
        + LOGPROB_BYTES * len(tokens)
        + ALTERNATIVE_BYTES * alternatives
    )
