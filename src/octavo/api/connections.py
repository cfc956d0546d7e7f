"""Connections: how many there may be, how long each may keep the server waiting, who goes when there is no room.

    accepted -> idle -> receiving -> answering -> idle -> ...
                headers     body to its end       answer handed to the socket

An idle connection has ``HEADER_TIMEOUT_S`` for the headers of its first request, ``keep_alive_s`` until the first byte
of a further one. Whoever has not sent a whole request has cost nothing but memory and gives way to a newcomer: idle
ones first, from the address that has the most of them, its oldest first. Requests take all but ``headroom`` of the
places, so there is always one to give way, and ``/health`` is always answered.

asyncio's own accept loop is not used: at the limit of descriptors it logs up to 2,048 tracebacks a second.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
import sys
from collections.abc import Callable
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from octavo.api.error_handlers import ApiError, error_response
from octavo.core.limits import (
    HEADER_TIMEOUT_S,
    MAX_BODY_PIECES,
    MAX_CONNECTIONS,
    MAX_HEADER_BYTES,
    MAX_PIPELINED_BYTES,
    MAX_RECEIVING_BYTES,
    MAX_UNSENT_BYTES,
    MIN_PIECE_BYTES,
    READ_BYTES,
    RESERVED_DESCRIPTORS,
    WRITE_TIMEOUT_S,
)

if sys.platform != "win32":  # there: no limit of descriptors, and progress is seen at the transport alone
    import fcntl
    import resource
    import termios

logger = logging.getLogger(__name__)

#: Answered however many requests there are.
ALWAYS_ANSWERED = "/health"
#: How often it is looked whether a slow reader has taken something.
WRITE_CHECK_S = 5.0
#: After this long it is tried again to accept, where there was no descriptor or no room.
RETRY_S = 0.05
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def connection_limit(wish: int | None) -> int:
    """Connections that the limit of descriptors has room for, at most ``wish``, or ``MAX_CONNECTIONS``.

    Raises the soft limit as far as that needs and the hard one allows.
    """
    wanted = wish or MAX_CONNECTIONS
    if sys.platform == "win32":
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + RESERVED_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    except (OSError, ValueError):  # macOS has a lower limit than it says
        raised = soft
    limit = max(8, min(wanted, raised - RESERVED_DESCRIPTORS))
    if wish is not None and limit < wish:
        logger.warning("max_connections is %d but the limit of descriptors allows %d; raise ulimit -n", wish, limit)
    return limit


class Connections:
    """All connections of a server."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.headroom = max(2, limit // 16)  # places that requests leave to others
        self.open: set[Connection] = set()
        self.idle = _ByAddress()
        self.receiving = _ByAddress()
        self.receiving_bytes = 0
        self.unsent: dict[Connection, int] = {}  # slow readers: bytes here that their sockets have not taken
        self.unsent_bytes = 0

    def make_room(self) -> bool:
        """Close a connection that has no whole request in progress; False if there is none."""
        victim = self.idle.oldest_of_largest() or self.receiving.oldest_of_largest()
        if victim is None:
            return False
        logger.warning(
            "%d connections are open: closing those that have no request in progress to take others; "
            "if these are wanted, raise --max-connections or ulimit -n",
            len(self.open),
        )
        victim.drop()
        return True

    def admit(self) -> bool:
        """Whether one more request, which has been counted, may run."""
        if len(self.open) - len(self.idle) <= self.limit - self.headroom:
            return True
        victim = self.receiving.oldest_of_largest()
        if victim is not None:
            victim.drop()
        return victim is not None

    def check_receiving(self) -> None:
        """Keep what bodies that have not arrived to their end take within ``MAX_RECEIVING_BYTES``."""
        while self.receiving_bytes > MAX_RECEIVING_BYTES and (victim := self.receiving.oldest_of_largest()):
            logger.warning("unfinished request bodies take over %d MB: closing the oldest", MAX_RECEIVING_BYTES >> 20)
            victim.drop()

    def note_unsent(self, connection: Connection, unsent: int) -> None:
        """``connection`` keeps ``unsent`` bytes; all together are kept within ``MAX_UNSENT_BYTES``."""
        self.unsent_bytes += unsent - self.unsent.pop(connection, 0)
        if unsent:
            self.unsent[connection] = unsent
        while self.unsent_bytes > MAX_UNSENT_BYTES:
            logger.warning("slow readers keep over %d MB: closing the one with most of it", MAX_UNSENT_BYTES >> 20)
            max(self.unsent, key=self.unsent.__getitem__).drop()


class _ByAddress:
    """Connections in one state, by address, the longest in this state first."""

    def __init__(self) -> None:
        self._of: dict[str, dict[Connection, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, connection: Connection) -> None:
        self._of.setdefault(connection.address, {})[connection] = None
        self._count += 1

    def remove(self, connection: Connection) -> None:
        of_address = self._of[connection.address]
        del of_address[connection]
        self._count -= 1
        if not of_address:
            del self._of[connection.address]

    def oldest_of_largest(self) -> Connection | None:
        """Of the address that has the most, the oldest."""
        largest = max(self._of.values(), key=len, default=None)
        return None if largest is None else next(iter(largest))


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 connection, with deadlines and within ``Connections``' bounds.

    The high-water mark of its write buffer is 0: writing is paused while there is anything left that was not sent.
    """

    def __init__(self, connections: Connections, config: Config, state: ServerState) -> None:
        super().__init__(config, state, app_state={})
        self.conn = self._parser = _BoundedParser(h11.SERVER, MAX_HEADER_BYTES)
        self.address = ""
        self._connections = connections
        self._place: _ByAddress | None = None  # None while answering
        self._received = 0  # bytes since it came to its place: of headers, or of a body that has not arrived to its end
        self._header_deadline: asyncio.TimerHandle | None = None
        self._write_check: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has been accepted."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # asyncio's default is 256 kB a callback
        self.address = network_of(self.client[0]) if self.client else ""
        self._connections.open.add(self)
        self._move_to(self._connections.idle)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended, whoever ended it."""
        super().connection_lost(exc)
        self._connections.open.discard(self)
        self._move_to(None)
        self._headers_are_there()
        self._stop_write_checks()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request, or of several."""
        super().data_received(data)
        self._note_state()
        if self._place is self._connections.receiving:
            if not self.cycle.response_started:  # else it is not kept
                self._received += len(data)
                self._connections.receiving_bytes += len(data)
                self._connections.check_receiving()
        elif self._place is self._connections.idle:
            self._received += len(data)
            if self._header_deadline is None:
                self._await_headers()
        elif self.flow.read_paused:  # further requests while one is answered: read on, or its leaving is not noticed
            if len(self.conn.trailing_data[0]) > MAX_PIPELINED_BYTES:
                self.drop()
            self.flow.resume_reading()

    def eof_received(self) -> None:
        """The client has closed its side, if only that one. It counts as leaving, also where it has not read yet."""
        self._end_request()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP; if it is the body of a request that is being answered, just end that."""
        self._end_request()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.drop()

    def on_response_complete(self) -> None:
        """The answer has been handed to the socket."""
        super().on_response_complete()
        self._note_state()

    def pause_writing(self) -> None:
        """The socket has not taken everything."""
        super().pause_writing()
        self._watch_reader(self._unacknowledged(), self.loop.time())

    def resume_writing(self) -> None:
        """The socket has taken everything."""
        super().resume_writing()
        self._stop_write_checks()
        self._note_state()

    def drop(self) -> None:
        """Close now, without sending what is left."""
        self._move_to(None)  # it gives way once
        self._stop_write_checks()
        self.transport.abort()

    def _end_request(self) -> None:
        """Tell the application that its client has left, before the connection is lost, which may take a while."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self.flow.resume_writing()

    def _note_state(self) -> None:
        if self.transport.is_closing():
            self._move_to(None)
            self._headers_are_there()
        elif self.cycle is not None and not self.cycle.response_complete:
            self._headers_are_there()
            self._move_to(self._connections.receiving if self.cycle.more_body else None)
        else:  # an answer that is being read is not over
            self._move_to(None if self.flow.write_paused else self._connections.idle)

    def _move_to(self, place: _ByAddress | None) -> None:
        if place is self._place:
            return
        if self._place is not None:
            self._place.remove(self)
        if self._place is self._connections.receiving:
            self._connections.receiving_bytes -= self._received
        self._received = 0
        if place is not None:
            place.add(self)
        self._place = place

    def _await_headers(self) -> None:
        self._header_deadline = self.loop.call_later(HEADER_TIMEOUT_S, self._headers_are_late)

    def _headers_are_there(self) -> None:
        if self._header_deadline is not None:
            self._header_deadline.cancel()
            self._header_deadline = None

    def _headers_are_late(self) -> None:
        if self._received and self.conn.their_state is h11.IDLE:
            self.transport.write(TIMED_OUT)
        self.transport.close()

    def _watch_reader(self, unacknowledged: int, progress_at: float) -> None:
        self._write_check = self.loop.call_later(WRITE_CHECK_S, self._check_progress, unacknowledged, progress_at)
        self._connections.note_unsent(self, self.transport.get_write_buffer_size() + self._parser.num_unsent)

    def _check_progress(self, before: int, progress_at: float) -> None:
        now, unacknowledged = self.loop.time(), self._unacknowledged()
        if unacknowledged != before:
            progress_at = now
        elif now - progress_at >= WRITE_TIMEOUT_S:
            logger.warning("closing connections whose clients have read nothing for %.0f s", WRITE_TIMEOUT_S)
            self.drop()
            return
        self._watch_reader(unacknowledged, progress_at)

    def _stop_write_checks(self) -> None:
        self._connections.note_unsent(self, 0)
        if self._write_check is not None:
            self._write_check.cancel()
            self._write_check = None

    def _unacknowledged(self) -> int:
        """Bytes that the client has not taken, here and in the kernel, where a slow reader's first megabytes are."""
        return self.transport.get_write_buffer_size() + _kernel_bytes(self.transport.get_extra_info("socket"))


class _BoundedParser(h11.Connection):
    """h11's parser; a body in too many pieces for its size is an error.

    num_unsent: bytes of the answer under way that are still to be handed over, where its length was declared: what is
    sent block by block lies with whoever sends it
    """

    num_unsent = 0
    _num_pieces, _num_bytes = 0, 0

    def send(self, event: Any) -> Any:
        """h11's."""
        if isinstance(event, h11.Response):
            self.num_unsent = sum(int(value) for name, value in event.headers if name == b"content-length")
        elif isinstance(event, h11.Data):
            self.num_unsent = max(0, self.num_unsent - len(event.data))
        elif isinstance(event, h11.EndOfMessage):
            self.num_unsent = 0
        return super().send(event)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """h11's."""
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._num_pieces += 1
            self._num_bytes += len(event.data)
            if self._num_pieces > MAX_BODY_PIECES + self._num_bytes // MIN_PIECE_BYTES:
                raise h11.RemoteProtocolError(f"{self._num_bytes} bytes come in {self._num_pieces} pieces")
        elif isinstance(event, h11.Request):
            self._num_pieces, self._num_bytes = 0, 0
        return event


def network_of(host: str) -> str:
    """What counts as one address: an IPv6 client has a /64 to itself."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


def _kernel_bytes(sock: socket.socket) -> int:
    """Bytes in a socket's send buffer that the peer has not acknowledged; 0 where the system does not say."""
    if sys.platform == "win32":
        return 0
    try:
        return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), "little")
    except OSError:
        return 0


class Listener:
    """Accepts connections for one listening socket, as many as ``Connections`` has room for. Like asyncio's Server."""

    def __init__(self, sock: socket.socket, connections: Connections, make: Callable[[], Connection]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._connections = connections
        self._make = make
        self._task = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Accept no more."""
        self._task.cancel()

    async def wait_closed(self) -> None:
        """Until nothing more is accepted."""
        await asyncio.wait([self._task])

    async def _accept(self) -> None:
        loop, connections = asyncio.get_running_loop(), self._connections
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._sock)
            except OSError as error:
                if error.errno in OUT_OF_RESOURCES:
                    logger.warning("cannot accept connections: %s; raise ulimit -n", error.strerror)
                    await asyncio.sleep(0 if connections.make_room() else RETRY_S)
                await asyncio.sleep(0)
                continue  # a client that has left before it was its turn, or another passing failure
            try:
                await loop.connect_accepted_socket(self._make, accepted)
            except OSError:  # it has left meanwhile
                accepted.close()
            while len(connections.open) > connections.limit:  # noqa: ASYNC110 - "open" shrinks in many places
                # A place is free once the event loop has come round: the descriptor is closed there.
                await asyncio.sleep(0 if connections.make_room() else RETRY_S)


class Gate:
    """ASGI: answers 503 where there are so many requests that nobody would be left to give way to a newcomer."""

    def __init__(self, app: ASGIApp, connections: Connections) -> None:
        self._app = app
        self._connections = connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["path"] == ALWAYS_ANSWERED or self._connections.admit():
            await self._app(scope, receive, send)
            return
        message = f"the server has as many requests as its {self._connections.limit} connections allow; retry later"
        headers = {"retry-after": "1", "connection": "close"}
        error = ApiError(503, message, code="too_many_connections", kind="server_error", headers=headers)
        await error_response(error)(scope, receive, send)
