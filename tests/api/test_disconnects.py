"""Clients that leave, read slowly, or wait long: over real sockets, since only these disconnect."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from live_server import LiveServer, wait_for
from wire import CHAT, COMPLETIONS, HELLO, answer_of, chat

from octavo.api import json_body, sse
from octavo.engine.request_stream import Unread


def open_request(
    server: LiveServer, path: str = CHAT, *, receive_buffer: int | None = None, **fields: Any
) -> socket.socket:
    body = json.dumps(({"messages": HELLO} if path == CHAT else {"prompt": "x"}) | fields).encode()
    sock = socket.socket()
    sock.settimeout(60)
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.connect(("127.0.0.1", server.port))
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    sock.sendall(head.encode() + b"\r\n" + body)
    return sock


def close_politely(sock: socket.socket) -> None:
    sock.close()


def close_rudely(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # RST instead of FIN
    sock.close()


@pytest.mark.parametrize("close", [close_politely, close_rudely])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_client_that_leaves_is_aborted_within_a_step(
    server: LiveServer, path: str, stream: bool, close: Callable[[socket.socket], None]
) -> None:
    server.engine.step_s = 0.05
    sock = open_request(server, path, stream=stream, ignore_eos=True, max_tokens=200)
    assert wait_for(lambda: server.engine.num_steps >= 3)
    assert server.engine.aborted == []
    close(sock)
    steps = server.engine.num_steps  # after it: this thread may wait for its turn longer than a step takes
    assert wait_for(lambda: len(server.engine.aborted) == 1)
    assert server.engine.num_steps <= steps + 2
    assert server.engine.streams == set()


def test_all_prompts_and_choices_of_a_client_that_leaves_are_aborted(server: LiveServer) -> None:
    server.engine.step_s = 0.02
    sock = open_request(server, COMPLETIONS, prompt=["a", "b", "c"], n=2, ignore_eos=True, max_tokens=200)
    assert wait_for(lambda: server.engine.num_steps >= 3)
    sock.close()
    assert wait_for(lambda: not server.engine.streams)
    assert sorted(server.engine.aborted) == sorted(request.request_id for request in server.engine.requests)
    assert len(server.engine.aborted) == 6


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_client_that_leaves_while_its_text_is_tokenised_ends_that_work(
    server: LiveServer, path: str, stream: bool
) -> None:
    server.engine.encode_s = 30.0
    sock = open_request(server, path, stream=stream)
    assert wait_for(lambda: len(server.engine.encoding_for) == 1)
    sock.close()
    assert wait_for(lambda: server.engine.num_left_encoding == 1)
    assert server.engine.requests == []


def test_a_client_that_leaves_while_its_body_is_parsed_ends_that_work(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    def endless(body: bytes) -> Iterator[None]:
        log.append("begun")
        try:
            while True:
                time.sleep(0.001)
                yield
        finally:
            log.append("ended")

    monkeypatch.setattr(json_body, "parse_json_steps", endless)
    sock = open_request(server, metadata=[{}] * 1000)
    assert wait_for(lambda: log == ["begun"])
    sock.close()
    assert wait_for(lambda: log == ["begun", "ended"])
    assert wait_for(lambda: server.engine.text_workers.num_jobs == 0)
    assert answer_of(chat(server.http))


def test_a_client_that_leaves_before_the_first_token_is_aborted(server: LiveServer) -> None:
    for stream in (True, False):
        server.engine.reset()
        server.engine.step_s = 30.0
        sock = open_request(server, stream=stream)
        assert wait_for(lambda: len(server.engine.streams) == 1)
        sock.close()
        assert wait_for(lambda: len(server.engine.aborted) == 1)


def test_a_client_that_reads_to_the_end_is_not_aborted_and_may_go_on(server: LiveServer) -> None:
    for _ in range(3):
        chat(server.http, stream=True)
        answer_of(chat(server.http))
    assert server.engine.aborted == []
    assert server.engine.streams == set()


def test_a_quiet_stream_is_kept_alive_with_blank_lines(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.05)
    server.engine.step_s = 0.3
    text = chat(server.http, stream=True, max_tokens=2).text
    assert text.startswith("\n\n" * 3)  # before the first token already
    assert text.endswith("data: [DONE]\n\n")


def test_a_busy_stream_has_no_blank_lines(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.2)
    server.engine.step_s = 0.02
    assert "\n\n\n" not in chat(server.http, stream=True, max_tokens=30, ignore_eos=True).text


def test_a_slow_reader_gets_its_text_in_larger_pieces_and_loses_none(server: LiveServer) -> None:
    server.engine.answer = lambda request: "x" * 400
    server.set_send_buffer(16384)
    sock = open_request(server, receive_buffer=16384, stream=True, n=2, logprobs=True, top_logprobs=20)
    # the engine does not wait for the reader
    assert wait_for(lambda: len(server.engine.requests) == 2 and not server.engine.streams)
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += sock.recv(1 << 20)
    sock.close()
    choices = [
        json.loads(line[6:])["choices"][0] for line in dechunk(data).split(b"\n\n") if line.startswith(b"data: {")
    ]
    texts, num_logprobs = [""] * 2, [0] * 2
    for choice in choices:
        texts[choice["index"]] += choice["delta"].get("content", "")
        num_logprobs[choice["index"]] += len(choice["logprobs"]["content"]) if choice["logprobs"] else 0
    assert texts == ["x" * 400] * 2
    assert num_logprobs == [401] * 2
    assert len(choices) < 200


def test_a_reader_that_lets_too_much_gather_is_told_why_its_stream_ends(server: LiveServer) -> None:
    server.engine.unread = Unread(limit=100_000)
    server.engine.step_s = 0.001
    server.set_send_buffer(4096)
    sock = open_request(
        server, receive_buffer=4096, stream=True, ignore_eos=True, max_tokens=480, logprobs=True, top_logprobs=20
    )
    assert wait_for(lambda: len(server.engine.aborted) == 1)
    assert server.engine.unread.total == 0
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += sock.recv(1 << 20)
    sock.close()
    *_, error, done, nothing = dechunk(data).split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    assert json.loads(error[6:])["error"]["code"] == "reader_too_slow"


def dechunk(data: bytes) -> bytes:
    """The body of a chunked answer."""
    pieces = []
    _, _, rest = data.partition(b"\r\n\r\n")
    at = 0
    while (end := rest.find(b"\r\n", at)) >= 0:
        size = int(rest[at:end], 16)
        pieces.append(rest[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
        if size == 0:
            break
    return b"".join(pieces)
