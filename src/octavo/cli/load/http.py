"""A small HTTP/1.1 client on asyncio's protocols, made for measuring: bytes are stamped in the callback they arrive in.

h11 does the framing. No task is woken per event, so a hundred streams cost the client as little as they can.
No proxies, no redirects, no compression.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import h11

from octavo._version import __version__
from octavo.core.errors import ConfigError


class ConnectFailed(Exception):
    """No connection could be made."""


class Broken(Exception):
    """The connection ended, or what came over it was not HTTP, before the answer was complete."""


class Receiver(Protocol):
    """Takes an answer as it arrives."""

    def on_response(self, status: int, content_type: str) -> None: ...

    def on_body(self, data: bytes, now_s: float) -> None:
        """A piece of the body: all that one read from the socket brought."""


@dataclass(frozen=True, slots=True)
class Url:
    """Where a server is. ``path`` begins the path of every request and has no slash at its end."""

    host: str
    port: int
    path: str
    tls: bool

    @classmethod
    def parse(cls, text: str) -> Url:
        """Raises ConfigError."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{text!r} is not a URL: {error}; write http://127.0.0.1:8000") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{text!r} is not an http or https URL; write http://127.0.0.1:8000")
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigError("the URL may not carry a user, a query or a fragment; give a key with --api-key")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), parts.path.rstrip("/"), tls)

    @property
    def authority(self) -> str:
        """The Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.path}"


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._http = h11.Connection(h11.CLIENT)
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._done: asyncio.Future[None] | None = None
        self.was_used = False
        self.has_answer = False  # to the exchange going on: its status has arrived

    @property
    def is_reusable(self) -> bool:
        """Whether another exchange may follow."""
        open_ = self._transport is not None and not self._transport.is_closing()
        return open_ and self._http.states == {h11.CLIENT: h11.IDLE, h11.SERVER: h11.IDLE}

    async def exchange(self, head: h11.Request, body: bytes, receiver: Receiver) -> None:
        """Send a request and hand its answer to ``receiver``. Raises Broken, and ValueError from ``receiver``."""
        assert self._transport is not None
        self._receiver, self.has_answer = receiver, False
        self._done = asyncio.get_running_loop().create_future()
        pieces = (self._http.send(head), self._http.send(h11.Data(body)), self._http.send(h11.EndOfMessage()))
        self._transport.write(b"".join(piece for piece in pieces if piece))
        await self._done
        self.was_used = True
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()

    def close(self) -> None:
        """At once; an exchange that was going on is lost."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """asyncio."""
        now_s = self._clock()
        self._http.receive_data(data)
        self._advance(now_s)

    def eof_received(self) -> None:
        """asyncio. An answer without a declared length ends so."""
        self._http.receive_data(b"")
        self._advance(self._clock())

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio."""
        self._end(Broken(f"the connection was lost: {exc or 'closed by the server'}"))

    def _advance(self, now_s: float) -> None:
        """Hand on what has arrived."""
        body: list[bytes] = []
        ended, error = False, None
        try:
            while not ended:
                event = self._http.next_event()
                if isinstance(event, h11.Data):
                    body.append(bytes(event.data))
                elif isinstance(event, h11.Response):
                    self.has_answer = True
                    if self._receiver is not None:
                        headers = dict(event.headers)
                        self._receiver.on_response(
                            event.status_code, headers.get(b"content-type", b"").decode("latin-1")
                        )
                elif isinstance(event, h11.EndOfMessage):
                    ended = True
                elif not isinstance(event, h11.InformationalResponse):  # NEED_DATA, PAUSED, ConnectionClosed
                    if isinstance(event, h11.ConnectionClosed):
                        error = Broken("the server closed the connection")
                    break
        except h11.RemoteProtocolError as problem:
            error = Broken(f"the answer broke off or is not HTTP: {problem}")
        try:
            if body and self._receiver is not None:
                self._receiver.on_body(b"".join(body), now_s)
        except ValueError as problem:  # the receiver cannot make sense of it
            self._end(problem)
            self.close()
            return
        if ended or error is not None:
            self._end(error)

    def _end(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)


class HttpClient:
    """Connections to one server, kept for the next request where the server allows it. A context that closes them."""

    def __init__(self, url: Url, headers: Sequence[tuple[str, str]], clock: Callable[[], float]) -> None:
        self.url = url
        self._clock = clock
        self._headers = [("Host", url.authority), ("User-Agent", f"octavo-bench/{__version__}"), *headers]
        self._ssl = ssl.create_default_context() if url.tls else None
        self._idle: list[Connection] = []

    async def exchange(self, method: str, path: str, body: bytes, receiver: Receiver) -> None:
        """One request and its answer. Raises ConnectFailed, Broken, or ValueError from ``receiver``."""
        headers = [*self._headers, ("Content-Length", str(len(body)))]
        if body:
            headers.append(("Content-Type", "application/json"))
        head = h11.Request(method=method, target=self.url.path + path, headers=headers)
        while True:
            connection = await self._connection()
            try:
                await connection.exchange(head, body, receiver)
            except Broken:
                # A server may close an idle connection just as it is used again: not the request's fault.
                if connection.was_used and not connection.has_answer:
                    continue
                raise
            finally:
                if connection.is_reusable:
                    self._idle.append(connection)
                else:
                    connection.close()
            return

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(self._clock), self.url.host, self.url.port, ssl=self._ssl
            )
        except ssl.SSLError as error:
            reason = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason
            raise ConnectFailed(f"TLS: {reason or error}") from error
        except OSError as error:
            raise ConnectFailed(_reason(error)) from error
        return connection

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # asyncio closes an aborted socket in its next round


def _reason(error: OSError) -> str:
    """``connection refused``; asyncio's own words repeat the address."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return error.strerror or str(error)
