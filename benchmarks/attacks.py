"""What clients that mean harm send, and clients that do not: for tests/attack and attacked_streams.py.

An attack gets an ``Attacker`` and returns once it has done its worst; its connections stay open until the attacker is
closed, so that whatever the server gets back, it got back by itself.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

HOST, PATIENCE_S = "127.0.0.1", 60.0
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def post(body: bytes, *, headers: bytes = b"Connection: close\r\n") -> bytes:
    """A request for a completion."""
    return POST + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body


def long_request(**fields: Any) -> bytes:
    """A request for a stream that ends with its client."""
    body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True} | fields
    return post(json.dumps(body).encode())


# clients that do not mean harm


@dataclass
class Answer:
    """What one well-behaved client was told, however it was cut, and when."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, int] = field(default_factory=dict)
    sent_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)  # of pieces, since ``sent_s``

    @property
    def told(self) -> tuple[Any, ...]:
        """All that must not depend on who else is there."""
        return self.text, self.token_ids, self.finish_reason, self.usage


async def well_behaved(port: int, index: int, max_tokens: int, started: asyncio.Event | None = None) -> Answer:
    """One seeded stream, read as it comes. ``started`` is set at its first token."""
    body = {
        "prompt": f"Chapter {index}. On that day, {index} of us",
        "seed": index,
        "temperature": 0.8,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    answer = Answer(sent_s=time.monotonic())
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(post(json.dumps(body).encode()))
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise AssertionError(f"a well-behaved client got {head!r} {await reader.read(2000)!r}")
        events = b""
        while size := int(await reader.readline(), 16):
            events += await reader.readexactly(size)
            await reader.readline()
            *whole, events = events.split(b"\n\n")
            for event in filter(None, whole):
                _take(answer, event)
            if started is not None and answer.token_ids:
                started.set()
    finally:
        writer.close()
    return answer


def _take(answer: Answer, event: bytes) -> None:
    if not event.startswith(b"data: "):
        raise AssertionError(f"no event: {event!r}")
    if event == b"data: [DONE]":
        return
    chunk = json.loads(event[6:])
    if "error" in chunk:
        raise AssertionError(f"a well-behaved client got {chunk}")
    if chunk["usage"] is not None:
        answer.usage = {name: chunk["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    for choice in chunk["choices"]:
        answer.text += choice["text"]
        answer.token_ids += choice["token_ids"]
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        answer.token_times_s.append(time.monotonic() - answer.sent_s)


async def answered(port: int, request: bytes = GET + b"Connection: close\r\n\r\n") -> tuple[int, bytes]:
    """Status and body of a request on a connection of its own."""
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(request)
            head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        finally:
            writer.close()
    return int(head.split()[1]), body


# clients that do


class Attacker:
    """Connections of one attack."""

    def __init__(self, port: int, size: int) -> None:
        """size: connections, or requests, that the attack makes."""
        self.port = port
        self.size = size
        self.statuses: list[int] = []  # of the answers that were read
        self._sockets: list[socket.socket] = []

    async def connect(self, sent: bytes = b"", *, receive_buffer: int = 0) -> socket.socket:
        """A connection, with ``sent`` sent as far as the server takes it."""
        sock = socket.socket()
        self._sockets.append(sock)
        sock.setblocking(False)
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(sock, (HOST, self.port))
        await self.send(sock, sent)
        return sock

    async def send(self, sock: socket.socket, data: bytes) -> bool:
        """Whether the server still takes it."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.get_running_loop().sock_sendall(sock, data)
        except OSError:
            return False
        return True

    async def trickle(self, sock: socket.socket, *, pause_s: float = 0.05) -> None:
        """A byte now and then, until the server has enough of it."""
        deadline = time.monotonic() + PATIENCE_S
        while await self.send(sock, b"x"):
            if time.monotonic() > deadline:
                raise AssertionError(f"the server bears with a trickle for over {PATIENCE_S} s")
            await asyncio.sleep(pause_s)

    async def expect_answer(self, request: bytes) -> None:
        """Note the status of the answer, 0 if the server has just closed."""
        sock = await self.connect(request)
        data = b""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while part := await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
                    data += part
        except OSError:
            pass
        sock.close()
        self.statuses.append(int(data.split()[1]) if data else 0)

    def close(self) -> None:
        """Leave."""
        for sock in self._sockets:
            sock.close()


Attack = Callable[[Attacker], Awaitable[None]]


async def slow_headers(attacker: Attacker) -> None:
    """Headers that never end, a byte now and then."""
    socks = [await attacker.connect(GET + b"x-slow: ") for _ in range(attacker.size)]
    await asyncio.gather(*map(attacker.trickle, socks))


async def slow_bodies(attacker: Attacker) -> None:
    """Bodies that never end, and one that no route reads."""
    heads = [POST + b"Content-Length: 100000\r\n\r\n{", GET + b"Content-Length: 100000\r\n\r\n"]
    socks = [await attacker.connect(heads[index % 8 == 7]) for index in range(attacker.size)]
    await asyncio.gather(*map(attacker.trickle, socks))


async def slow_readers(attacker: Attacker) -> None:
    """Streams and whole answers of megabytes that nobody reads."""
    for index in range(attacker.size):
        await attacker.connect(long_request(logprobs=20, stream=index % 2 == 0, max_tokens=120), receive_buffer=4096)


async def half_open(attacker: Attacker) -> None:
    """Nothing at all; half a request, then a closed side; a request, then a closed side."""
    for index in range(attacker.size):
        sock = await attacker.connect((b"", GET, long_request())[index % 3])
        if index % 3:
            sock.shutdown(socket.SHUT_WR)


async def resets(attacker: Attacker) -> None:
    """Connections that are reset at once, within the body, and within the answer."""
    body = long_request()

    async def one(index: int) -> None:
        sock = await attacker.connect((b"", body[:-20], body)[index % 3])
        await asyncio.sleep(0.02 * (index % 7))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()

    await asyncio.gather(*map(one, range(attacker.size)))


async def many_connections(attacker: Attacker) -> None:
    """As many as there are, each silent."""
    for _ in range(attacker.size):
        await attacker.connect()


async def header_floods(attacker: Attacker) -> None:
    """Many tiny headers, a long one, and many long ones."""
    floods = [
        b"a:\r\n" * 4000,
        b"x: " + b"y" * 100_000 + b"\r\n",
        b"".join(b"x-%d: %s\r\n" % (i, b"y" * 500) for i in range(400)),
    ]
    await _all_answered(attacker, [GET + b"Connection: close\r\n" + flood + b"\r\n" for flood in floods])


async def deep_json(attacker: Attacker) -> None:
    """Brackets within brackets."""
    bodies = [b'{"prompt": ' + b"[" * 50_000, b'{"a":' * 50_000, b"[" * 20_000 + b"]" * 20_000]
    await _all_answered(attacker, [post(body) for body in bodies])


async def huge_numbers(attacker: Attacker) -> None:
    """Numbers that no field, or no machine type, holds."""
    digits = b"9" * 100_000
    fields = [
        *(b'"max_tokens": ' + n for n in (digits, b"1e999", b"-" + digits, b"1e400", b"18446744073709551616")),
        *(b'"temperature": ' + n for n in (digits, b"1e308", b"-1e999", b"0." + digits, b"1e-99999999999999999999")),
        *(b'"seed": ' + n for n in (digits, b"1e999", b"340282366920938463463374607431768211456")),
        *(b'"n": ' + n for n in (b"4294967297", b"1e18", b"NaN", b"Infinity")),
        *(b'"prompt": [' + n + b"]" for n in (digits, b"-1", b"9223372036854775808", b"1e999", b"0.5")),
    ]  # fmt: skip
    await _all_answered(attacker, [post(b'{"max_tokens": 1, ' + f + b', "prompt": 7}') for f in fields])


async def duplicate_keys(attacker: Attacker) -> None:
    """The same key over and over, and many keys."""
    bodies = [
        b'{"prompt": "a", "prompt": "b"}',
        b"{" + b",".join([b'"prompt": "a"'] * 20_000) + b"}",
        b"{" + b",".join(b'"k%d": 0' % index for index in range(20_000)) + b"}",
    ]
    await _all_answered(attacker, [post(body) for body in bodies])


async def tiny_chunks(attacker: Attacker) -> None:
    """A body of one byte per chunk."""
    head = POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    await _all_answered(attacker, [head + b"1\r\n \r\n" * 50_000])


async def pipelines(attacker: Attacker) -> None:
    """Request upon request behind one that runs."""
    for _ in range(attacker.size):
        await attacker.connect(long_request() + (GET + b"\r\n") * 10_000)


async def _all_answered(attacker: Attacker, requests: list[bytes]) -> None:
    """Each request in turn, ``attacker.size`` in all, at least each once, four at a time."""
    waiting = [requests[index % len(requests)] for index in range(max(attacker.size, len(requests)))]

    async def one_after_another() -> None:
        while waiting:
            await attacker.expect_answer(waiting.pop())

    await asyncio.gather(*(one_after_another() for _ in range(4)))


#: Attack -> its size in the short form, and in the long one.
ATTACKS: dict[Attack, tuple[int, int]] = {
    slow_headers: (12, 200),
    slow_bodies: (12, 200),
    slow_readers: (6, 32),
    half_open: (24, 300),
    resets: (24, 600),
    many_connections: (200, 2000),
    header_floods: (6, 120),
    deep_json: (3, 60),
    huge_numbers: (22, 220),
    duplicate_keys: (3, 60),
    tiny_chunks: (2, 20),
    pipelines: (6, 60),
}
