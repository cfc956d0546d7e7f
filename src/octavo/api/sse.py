"""Server-sent events, and noticing that a client has left.

ASGI servers report a disconnect through ``receive()`` alone: writing to a closed connection is not an error, so whoever
does not listen computes for nobody. Both kinds of answer listen here, streamed or not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.api.error_handlers import error_json
from octavo.core.errors import OctavoError

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: A blank line is sent after this long without an event: proxies close what looks idle.
KEEP_ALIVE_S = 15.0
#: Not a comment (": ..."): clients that strip each network chunk (vllm bench serve) would join it to the next event.
KEEP_ALIVE = b"\n\n"
DONE = b"data: [DONE]\n\n"


class UntilDisconnect:
    """A context whose body is interrupted with ClientDisconnect when the client leaves.

    The request's body must have been read. ``on_disconnect`` is called first, at once.
    """

    def __init__(self, receive: Receive, on_disconnect: Callable[[], None]) -> None:
        self._receive = receive
        self._on_disconnect = on_disconnect
        self._gone = False

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self._watcher = asyncio.create_task(self._watch())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        task = self._task
        del self._watcher, self._task  # or they and this would keep each other, and the request with them
        if self._gone:
            assert task is not None
            # Ours, like asyncio.timeout's: other cancellations (the server's) go on.
            if task.uncancel() == 0 and kind is asyncio.CancelledError:
                raise ClientDisconnect from error

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._on_disconnect()
        assert self._task is not None
        self._task.cancel()


class EventStream(Response):
    """Sends the events of a generator, each item a complete group of them (or its blocks), and ends with ``[DONE]``.

    An error after the first byte becomes an event of its own. ``abort`` is called however the stream ends, and at once
    if the client leaves. A reader that is too slow holds the generator back.
    """

    def __init__(self, events: AsyncGenerator[bytes | Sequence[bytes]], abort: Callable[[], None]) -> None:
        # Not Response.__init__: it would declare the length of a body that does not exist yet.
        self.status_code = 200
        self.background = None
        self.raw_headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # nginx would hold events back
        ]
        self._events = events
        self._abort = abort
        self._writing = asyncio.Lock()
        self._busy = False  # something was sent since the last look

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            async with UntilDisconnect(receive, self._abort), aclosing(self._events):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                keep_alive = asyncio.create_task(self._keep_alive(send))
                try:
                    await self._send_events(send)
                finally:
                    keep_alive.cancel()
                await send({"type": "http.response.body", "body": DONE, "more_body": False})
        except ClientDisconnect:
            logger.debug("a client left its stream")
        finally:
            self._abort()

    async def _send_events(self, send: Send) -> None:
        try:
            async for events in self._events:
                await self._write(send, events)
        except OctavoError as error:
            await self._write(send, event(error_json(error)))
        except Exception as error:
            logger.exception("a stream failed")
            await self._write(send, event(error_json(error)))

    async def _write(self, send: Send, events: bytes | Sequence[bytes]) -> None:
        async with self._writing:
            for block in (events,) if isinstance(events, bytes) else events:
                await send({"type": "http.response.body", "body": block, "more_body": True})
                if block is not events:
                    await asyncio.sleep(0)  # a breath for the event loop
            self._busy = True

    async def _keep_alive(self, send: Send) -> None:
        while True:
            self._busy = False
            await asyncio.sleep(KEEP_ALIVE_S)
            if not self._busy and not self._writing.locked():
                await self._write(send, KEEP_ALIVE)


def event(json_text: str) -> bytes:
    """One event."""
    return f"data: {json_text}\n\n".encode()


async def until_disconnect(receive: Receive, abort: Callable[[], None], answer: Awaitable[T]) -> T:
    """Await ``answer``; if the client leaves, abort at once and raise ClientDisconnect."""
    async with UntilDisconnect(receive, abort):
        return await answer
