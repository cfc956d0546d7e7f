"""Connections that wait, crowd, or half leave: deadlines, places, who gives way. Over real sockets."""

from __future__ import annotations

import itertools
import json
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, running_server, wait_for
from wire import CHAT, COMPLETIONS, HELLO, chat, complete

from octavo.api import connections as module

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that a test can wait for."""
    monkeypatch.setattr(module, "HEADER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(module, "WRITE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(module, "WRITE_CHECK_S", 0.05)


@pytest.fixture
def connect(server: LiveServer) -> Iterator[Callable[..., socket.socket]]:
    """Connections to ``server`` that end with the test."""
    opened = []

    def get(sent: bytes = b"", *, port: int | None = None, source: str = "", receive_buffer: int = 0) -> socket.socket:
        sock = socket.socket()
        opened.append(sock)
        sock.settimeout(10)
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        if source:
            sock.bind((source, 0))
        sock.connect(("127.0.0.1", port or server.port))
        sock.sendall(sent)
        return sock

    yield get
    for sock in opened:
        sock.close()


def request(path: str = CHAT, **fields: Any) -> bytes:
    body = json.dumps(({"messages": HELLO} if path == CHAT else {"prompt": "x"}) | fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def read_to_end(sock: socket.socket) -> bytes:
    """What comes until the server closes; a reset counts as that."""
    data = b""
    try:
        while part := sock.recv(1 << 16):
            data += part
    except ConnectionResetError:
        pass
    return data


def is_closed(sock: socket.socket) -> bool:
    """Whether the server has closed it. sock: one that nothing has been sent to."""
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    finally:
        sock.settimeout(10)


# deadlines


@pytest.mark.usefixtures("hasty")
def test_a_client_that_says_nothing_is_let_go(connect: Callable[..., socket.socket]) -> None:
    assert read_to_end(connect()) == b""


@pytest.mark.usefixtures("hasty")
def test_headers_that_do_not_arrive_are_a_408(connect: Callable[..., socket.socket]) -> None:
    assert read_to_end(connect(GET)).startswith(b"HTTP/1.1 408 ")


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    "before",
    [
        GET,
        GET + b"\r\n" + GET,  # the second request of a connection
        GET + b"Content-Length: 100000\r\n\r\n",  # a body that no route reads
    ],
)
def test_a_trickle_does_not_put_the_deadline_off(connect: Callable[..., socket.socket], before: bytes) -> None:
    sock = connect(before)

    def trickle() -> bool:
        try:
            sock.sendall(b"x")
        except OSError:
            return True
        return False

    assert wait_for(trickle)


def test_an_idle_connection_is_closed_after_keep_alive(
    connect: Callable[..., socket.socket], start_server: Callable[..., Any]
) -> None:
    with start_server(keep_alive_s=0.1) as server:
        server.wait_until_ready()
        assert read_to_end(connect(GET + b"\r\n", port=server.port)).endswith(b'{"status":"ready"}')


@pytest.mark.usefixtures("hasty")
def test_a_request_that_runs_for_longer_than_every_deadline_is_answered(server: LiveServer) -> None:
    server.engine.step_s = 0.7
    assert chat(server.http, max_tokens=1).status_code == 200


# places


@pytest.fixture
def small_server() -> Iterator[LiveServer]:
    """One with places for 16 connections, 14 of them for requests."""
    with running_server(max_connections=16) as server:
        server.wait_until_ready()
        yield server


def health(server: LiveServer, connect: Callable[..., socket.socket]) -> bool:
    """Whether a new client is answered."""
    return connect(GET + b"\r\n", port=server.port).recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_idle_connections_give_way_and_running_requests_do_not(
    small_server: LiveServer, connect: Callable[..., socket.socket]
) -> None:
    small_server.engine.step_s = 0.01
    running = connect(request(stream=True, ignore_eos=True, max_tokens=300), port=small_server.port)
    assert running.recv(16).startswith(b"HTTP/1.1 200")
    idle = [connect(port=small_server.port) for _ in range(100)]
    assert health(small_server, connect)
    assert wait_for(lambda: len(small_server.server.connections.open) <= 16)
    assert wait_for(lambda: sum(map(is_closed, idle)) >= 84)
    assert all(map(is_closed, idle[:80])), "the oldest first"
    assert not is_closed(idle[-1])
    assert small_server.engine.aborted == []
    small_server.engine.step_s = 0.0
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += running.recv(1 << 16)
    assert b"[DONE]" in data


def test_unfinished_bodies_give_way(small_server: LiveServer, connect: Callable[..., socket.socket]) -> None:
    half = POST + b'Content-Length: 1000\r\n\r\n{"prompt": '
    slow = [connect(half, port=small_server.port) for _ in range(40)]
    assert health(small_server, connect)
    assert wait_for(lambda: sum(map(is_closed, slow)) >= 24)
    assert complete(small_server.http).status_code == 200


@pytest.mark.skipif(sys.platform != "linux", reason="needs more than one loopback address")
def test_the_address_with_most_connections_gives_way(
    small_server: LiveServer, connect: Callable[..., socket.socket]
) -> None:
    modest = [connect(port=small_server.port, source="127.0.0.2") for _ in range(3)]
    greedy = [connect(port=small_server.port, source="127.0.0.3") for _ in range(60)]
    assert wait_for(lambda: sum(map(is_closed, greedy)) >= 47)
    assert not any(map(is_closed, modest))


def test_an_ipv6_client_counts_by_its_network() -> None:
    assert module.network_of("2001:db8::1") == module.network_of("2001:db8::ffff:1") != module.network_of("2001:db9::1")
    assert module.network_of("::ffff:10.0.0.1") == module.network_of("10.0.0.1") == "10.0.0.1"
    assert module.network_of("fe80::1%eth0") == module.network_of("fe80::2%eth0")


def test_requests_leave_places_so_that_health_is_answered(
    small_server: LiveServer, connect: Callable[..., socket.socket]
) -> None:
    small_server.engine.step_s = 30.0
    answers = [connect(request(max_tokens=2), port=small_server.port) for _ in range(15)]
    assert wait_for(lambda: len(small_server.engine.streams) == 14)
    refused = read_to_end(answers[-1])
    assert refused.startswith(b"HTTP/1.1 503")
    assert b'"too_many_connections"' in refused
    assert b"retry-after: 1" in refused
    for _ in range(20):
        assert health(small_server, connect)
    assert len(small_server.engine.streams) == 14


@pytest.mark.parametrize("wish", [None, 30, 300])
def test_the_limit_follows_from_the_descriptors(monkeypatch: pytest.MonkeyPatch, wish: int | None) -> None:
    limits = [(64, 200)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    assert module.connection_limit(wish) == min(wish or 4096, 200 - 64)
    assert limits[-1] == (94 if wish == 30 else 200, 200), "the soft limit is raised as far as needed"


PROGRAM = """
import resource, sys
sys.path.insert(0, {here!r})
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
import logging
from fake_engine import FakeEngine
from octavo.api import connections, serve
from octavo.core.config import ServerConfig

logging.basicConfig(level="INFO")
{before}
serve(FakeEngine(), ServerConfig(port=0), on_ready=lambda url: print(url, flush=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "connections.RESERVED_DESCRIPTORS = 0"])  # the second runs out of descriptors
def test_more_clients_than_descriptors_neither_lock_the_server_nor_fill_its_log(before: str, tmp_path: Path) -> None:
    program = PROGRAM.format(here=str(Path(__file__).parent), before=before)
    log = tmp_path / "log"
    with log.open("w") as err:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=err, text=True)
        idle: list[socket.socket] = []
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().rsplit(":", 1)[1])
            for round_ in range(4):
                idle += [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(100)]
                with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
                    sock.sendall(GET + b"\r\n")
                    assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200"), round_
        finally:
            for sock in idle:
                sock.close()
            process.terminate()
            process.communicate(timeout=10)
    assert log.stat().st_size < 4096, log.read_text()[:2000]


# what one client may send at once


def test_a_header_block_over_the_limit_is_refused_however_fast_it_comes(connect: Callable[..., socket.socket]) -> None:
    headers = b"".join(b"x-%d: %s\r\n" % (i, b"y" * 90) for i in range(400))
    assert len(headers) > 2 * 16384
    assert read_to_end(connect(GET + headers + b"\r\n")).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("num_bytes", "piece", "is_read"),
    [(1000, 1, True), (2000, 1, False), (400_000, 256, True), (400_000, 128, False)],
)
def test_a_body_in_too_many_pieces_for_its_size_is_refused(
    connect: Callable[..., socket.socket], num_bytes: int, piece: int, is_read: bool
) -> None:
    body = b'{"prompt": "' + b"x" * (num_bytes - 14) + b'"}'
    pieces = (body[at : at + piece] for at in range(0, num_bytes, piece))
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(data), data) for data in pieces)
    sock = connect(POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
    assert (b"context_length_exceeded" in read_to_end(sock)) == is_read


@pytest.mark.parametrize(
    "head",
    [
        POST,  # its body is awaited
        POST.replace(b"application/json", b"text/plain"),  # answered before its body is there
        POST.replace(b"/v1/completions", b"/v1/nothing"),
    ],
    ids=["awaited", "answered before", "no route"],
)
def test_garbage_in_place_of_a_chunk_ends_the_request_and_leaves_no_traceback(
    server: LiveServer, connect: Callable[..., socket.socket], caplog: pytest.LogCaptureFixture, head: bytes
) -> None:
    sock = connect(head + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", receive_buffer=4096)
    if head is not POST:
        assert sock.recv(12) == b"HTTP/1.1 %d" % (415 if b"text" in head else 404)
    sock.sendall(b"garbage\r\n" * 10)
    read_to_end(sock)
    assert wait_for(lambda: not server.server.server_state.tasks)
    assert "Traceback" not in caplog.text
    assert "Exception" not in caplog.text


def test_a_callback_takes_a_bounded_piece_of_a_large_body(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    received = module.Connection.data_received

    def noted(self: module.Connection, data: bytes) -> None:
        sizes.append(len(data))
        received(self, data)

    monkeypatch.setattr(module.Connection, "data_received", noted)
    complete(server.http, prompt="x" * 300_000)
    assert sum(sizes) > 300_000
    assert max(sizes) <= module.READ_BYTES


def test_all_unfinished_bodies_together_are_bounded(
    server: LiveServer, connect: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_RECEIVING_BYTES", 200_000)
    places = server.server.connections
    slow = [connect(POST + b"Content-Length: 1000000\r\n\r\n" + b" " * 60_000) for _ in range(6)]
    assert wait_for(lambda: sum(map(is_closed, slow)) >= 3)
    assert all(map(is_closed, slow[:3]))
    assert not is_closed(slow[-1])
    for sock in slow:
        sock.close()
    assert wait_for(lambda: (len(places.receiving), places.receiving_bytes) == (0, 0))


def test_a_refused_body_that_is_discarded_does_not_count(
    server: LiveServer, connect: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_RECEIVING_BYTES", 200_000)
    places = server.server.connections
    other = connect(POST + b"Content-Length: 1000\r\n\r\n{")
    assert wait_for(lambda: len(places.receiving) == 1)
    refused = connect(POST + b"Content-Length: 9000000\r\n\r\n")
    assert refused.recv(12) == b"HTTP/1.1 413"
    refused.sendall(bytes(9_000_000))
    read_to_end(refused)
    assert not is_closed(other)
    assert places.receiving_bytes < 2000


# leaving by halves


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_client_that_closes_its_side_alone_has_left(
    server: LiveServer, connect: Callable[..., socket.socket], path: str, stream: bool
) -> None:
    server.engine.step_s = 0.02
    sock = connect(request(path, stream=stream, ignore_eos=True, max_tokens=400))
    assert wait_for(lambda: server.engine.num_steps >= 3)
    sock.shutdown(socket.SHUT_WR)
    assert wait_for(lambda: len(server.engine.aborted) == 1)
    read_to_end(sock)  # and the connection is closed


def test_a_client_that_closes_its_side_and_does_not_read_has_left(
    server: LiveServer, connect: Callable[..., socket.socket]
) -> None:
    """Its unread answer keeps the connection open for a while, not its request."""
    server.engine.step_s = 0.001
    server.set_send_buffer(4096)
    sock = connect(
        request(stream=True, ignore_eos=True, max_tokens=480, logprobs=True, top_logprobs=20), receive_buffer=4096
    )
    places = server.server.connections
    assert wait_for(lambda: bool(places.unsent))
    assert server.engine.aborted == []
    sock.shutdown(socket.SHUT_WR)
    assert wait_for(lambda: len(server.engine.aborted) == 1)


def test_a_client_that_leaves_with_a_further_request_under_way_is_noticed(
    server: LiveServer, connect: Callable[..., socket.socket]
) -> None:
    server.engine.step_s = 0.02
    sock = connect(request(ignore_eos=True, max_tokens=400))
    assert wait_for(lambda: server.engine.num_steps >= 3)
    sock.sendall(request())
    sock.close()
    assert wait_for(lambda: len(server.engine.aborted) == 1)


def test_further_requests_are_answered_in_turn_and_bounded(
    server: LiveServer, connect: Callable[..., socket.socket]
) -> None:
    sock = connect(request(max_tokens=1) * 3 + GET + b"Connection: close\r\n\r\n")
    assert read_to_end(sock).count(b"HTTP/1.1 200") == 4
    server.engine.step_s = 0.02
    flood = connect(request(ignore_eos=True, max_tokens=400))
    assert wait_for(lambda: server.engine.num_steps >= 3)
    with suppress(OSError):
        flood.sendall(GET * 100_000)
    assert wait_for(lambda: len(server.engine.aborted) == 1)


# slow readers


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_is_closed_and_its_request_ends(
    server: LiveServer, connect: Callable[..., socket.socket], stream: bool
) -> None:
    server.set_send_buffer(4096)
    places = server.server.connections
    connect(
        request(stream=stream, ignore_eos=True, max_tokens=480, logprobs=True, top_logprobs=20), receive_buffer=4096
    )
    assert wait_for(lambda: bool(places.unsent))
    assert wait_for(lambda: not places.unsent and not server.engine.streams)
    assert places.unsent_bytes == 0


def test_a_client_that_reads_however_slowly_is_not_closed(
    server: LiveServer, connect: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(module, "WRITE_CHECK_S", 0.01)
    looks = itertools.count()
    monkeypatch.setattr(module, "_kernel_bytes", lambda _: next(looks))  # it has taken a byte since the last look
    server.set_send_buffer(4096)
    places = server.server.connections
    connect(request(ignore_eos=True, max_tokens=400, logprobs=True, top_logprobs=20), receive_buffer=4096)
    assert wait_for(lambda: next(looks) > 100)
    assert len(places.unsent) == 1
    monkeypatch.setattr(module, "_kernel_bytes", lambda _: 0)
    assert wait_for(lambda: not places.unsent)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel may not say")
def test_the_kernel_says_what_a_client_has_not_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(listening.getsockname())
        sock, _ = listening.accept()
        with sock:
            sock.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    sock.send(bytes(4096))
            assert wait_for(lambda: module._kernel_bytes(sock) > 4096)
            before = module._kernel_bytes(sock)
            assert wait_for(lambda: reader.recv(4096) == b"" or module._kernel_bytes(sock) < before)


def test_an_answer_that_is_being_read_does_not_give_way(
    small_server: LiveServer, connect: Callable[..., socket.socket]
) -> None:
    small_server.set_send_buffer(4096)
    places = small_server.server.connections
    large = request(ignore_eos=True, max_tokens=400, logprobs=True, top_logprobs=20)
    reader = connect(large, port=small_server.port, receive_buffer=4096)
    assert wait_for(lambda: bool(places.unsent) and not small_server.engine.streams)
    for _ in range(60):
        connect(port=small_server.port)
    assert health(small_server, connect)
    data = b""
    while not data.endswith(b'"completion_tokens_details":{"reasoning_tokens":0}}}'):
        part = reader.recv(1 << 16)
        assert part, "closed before the end"
        data += part
    assert wait_for(lambda: not places.unsent)


def test_what_all_slow_readers_keep_is_bounded(
    server: LiveServer, connect: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_UNSENT_BYTES", 1_000_000)
    server.set_send_buffer(4096)
    places = server.server.connections
    large = request(ignore_eos=True, max_tokens=400, logprobs=True, top_logprobs=20)
    readers = [connect(large, receive_buffer=4096) for _ in range(6)]
    assert wait_for(lambda: len(server.engine.requests) == 6 and not server.engine.streams)
    assert wait_for(lambda: len(places.unsent) < 6)
    assert 0 < places.unsent_bytes <= 1_000_000
    for sock in readers:
        sock.close()
    assert wait_for(lambda: (places.unsent_bytes, places.unsent) == (0, {}))
