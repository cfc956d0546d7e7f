"""A server whose answers are written by the test, on loopback, in a thread of its own."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

#: (method, path, body) -> the bytes of the answer, piece by piece
Answer = Callable[[str, str, Any], Iterator[bytes]]


def plain(status: int, body: Any, content_type: str = "application/json") -> bytes:
    """A complete answer."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\nContent-Length: {len(text)}\r\n\r\n"
    return head.encode() + text


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One piece of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(fields: Any) -> bytes:
    return b"data: " + (fields if isinstance(fields, bytes) else json.dumps(fields).encode()) + b"\n\n"


def text_event(text: str, finish: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish, **more}]})


def chat_event(finish: str | None = None, **delta: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def usage_event(prompt: int, completion: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


DONE = event(b"[DONE]")


def stream(events: Sequence[bytes]) -> Iterator[bytes]:
    yield STREAM_HEAD
    for one in events:
        yield chunk(one)
    yield b"0\r\n\r\n"


def prompt_length(body: Any) -> int:
    """Ids, or words and 7 of a template."""
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    text = prompt if isinstance(prompt, str) else " ".join(message["content"] for message in body["messages"])
    return 7 + len(text.split())


def obliging(method: str, path: str, body: Any) -> Iterator[bytes]:
    """A server that does all that is asked, one token per event."""
    if path.endswith("/models"):
        yield plain(200, {"data": [{"id": "stub"}]})
        return
    count = body["max_tokens"]
    one = (lambda finish: chat_event(finish, content="x")) if "messages" in body else (lambda f: text_event("x", f))
    events = [one("length" if index == count - 1 else None) for index in range(count)]
    yield from stream([*events, usage_event(prompt_length(body), count), DONE])


class Stub:
    """``requests`` are the bodies of what was asked, in order of arrival."""

    def __init__(self, answer: Answer, tls: ssl.SSLContext | None = None) -> None:
        self.answer = answer
        self.requests: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.num_connections = 0
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http{'s' if tls else ''}://{'localhost' if tls else '127.0.0.1'}:{self.port}"
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.num_connections += 1
                self._open.add(connection)
                self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, EOFError):
            if self._tls is not None:
                raw, connection = connection, self._tls.wrap_socket(connection, server_side=True)
                self._open.discard(raw)
                self._open.add(connection)
            with connection, connection.makefile("rb") as file:
                while True:
                    method, path, _ = file.readline().decode().split(" ", 2) if (line := file.peek(1)) else _eof(line)
                    headers = {}
                    while (line := file.readline().strip()) != b"":
                        name, _, value = line.decode().partition(":")
                        headers[name.lower()] = value.strip()
                    raw_body = file.read(int(headers.get("content-length", 0)))
                    body = json.loads(raw_body) if raw_body else None
                    self.headers.append(headers)
                    if body is not None:
                        self.requests.append(body)
                    for piece in self.answer(method, path, body):
                        connection.sendall(piece)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for thread in self._threads:
            thread.join(5)
            assert not thread.is_alive()


def _eof(line: bytes) -> Any:
    raise EOFError(line)


@contextmanager
def stub_server(answer: Answer = obliging, tls: ssl.SSLContext | None = None) -> Iterator[Stub]:
    server = Stub(answer, tls)
    try:
        yield server
    finally:
        server.close()
