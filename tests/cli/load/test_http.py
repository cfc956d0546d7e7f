"""The HTTP client, against a server that cuts, closes and lies."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub import DONE, STREAM_HEAD, chunk, obliging, plain, stub_server, text_event

from octavo.cli.load.http import Broken, ConnectFailed, Connection, HttpClient, Url
from octavo.core.errors import ConfigError


class Kept:
    """A receiver that keeps it all."""

    def __init__(self) -> None:
        self.status, self.content_type = 0, ""
        self.pieces: list[tuple[float, bytes]] = []

    def on_response(self, status: int, content_type: str) -> None:
        self.status, self.content_type = status, content_type

    def on_body(self, data: bytes, now_s: float) -> None:
        self.pieces.append((now_s, data))

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)


class NoTransport(asyncio.Transport):
    """Takes what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True


def exchange_fed(pieces: list[bytes], *, eof: bool = False) -> tuple[Kept, Connection]:
    """An exchange whose answer arrives in these pieces, at 0 s, 1 s, ... by the connection's clock."""
    kept, times = Kept(), itertools.count()

    async def run() -> Connection:
        connection = Connection(lambda: float(next(times)))
        connection.connection_made(NoTransport())
        head = h11.Request(method="GET", target="/", headers=[("Host", "h"), ("Content-Length", "0")])
        going = asyncio.create_task(connection.exchange(head, b"", kept))
        await asyncio.sleep(0)
        for piece in pieces:
            connection.data_received(piece)
        if eof:
            connection.eof_received()
            connection.connection_lost(None)
        await going
        return connection

    return kept, asyncio.run(run())


BODY = b"".join(text_event(word) for word in ("one", "two", "thrée")) + DONE
CHUNKED = STREAM_HEAD + b"".join(chunk(BODY[at : at + 17]) for at in range(0, len(BODY), 17)) + b"0\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + BODY


@given(st.sampled_from([CHUNKED, SIZED, UNTIL_CLOSE]), st.lists(st.integers(0, len(CHUNKED)), max_size=30))
def test_an_answer_does_not_depend_on_where_the_network_cuts_it(answer: bytes, cuts: list[int]) -> None:
    places = [0, *sorted(cut for cut in set(cuts) if 0 < cut < len(answer)), len(answer)]
    pieces = [answer[start:end] for start, end in itertools.pairwise(places)]
    kept, connection = exchange_fed(pieces, eof=answer is UNTIL_CLOSE)
    assert (kept.status, kept.body) == (200, BODY)
    assert kept.content_type == "text/event-stream"
    assert connection.is_reusable == (answer is not UNTIL_CLOSE)


def test_what_one_read_brings_is_one_piece_with_the_time_of_its_arrival() -> None:
    one, two = chunk(b"a") + chunk(b"b"), chunk(b"c") + b"0\r\n\r\n"
    kept, _ = exchange_fed([STREAM_HEAD, one, two])
    assert kept.pieces == [(1.0, b"ab"), (2.0, b"c")]


@pytest.mark.parametrize(
    "answer",
    [
        CHUNKED[:-5],  # the last chunk is missing
        SIZED[:-1],
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        STREAM_HEAD + b"zz\r\n",
    ],
)
def test_an_answer_that_breaks_off_or_is_no_http_is_broken(answer: bytes) -> None:
    with pytest.raises(Broken):
        exchange_fed([answer] if answer else [], eof=True)


def fetch(url: str, times: int = 1, method: str = "GET") -> list[Kept]:
    """The same request so many times, one after the other."""

    async def run() -> list[Kept]:
        found = []
        async with HttpClient(Url.parse(url), [("X-Test", "1")], lambda: 0.0) as client:
            for _ in range(times):
                found.append(Kept())
                await client.exchange(method, "/v1/models", b"{}" if method == "POST" else b"", found[-1])
        return found

    return asyncio.run(run())


def test_a_connection_is_used_again() -> None:
    with stub_server() as server:
        fetch(server.url, times=3)
        assert server.num_connections == 1
        assert [headers["host"] for headers in server.headers] == [f"127.0.0.1:{server.port}"] * 3
        assert server.headers[0]["x-test"] == "1"


def test_a_kept_connection_that_the_server_has_closed_meanwhile_costs_no_request() -> None:
    answered = itertools.count()

    def once_per_connection(method: str, path: str, body: Any) -> Iterator[bytes]:
        if next(answered) % 2:  # the second on a connection: gone without a word
            raise EOFError
        yield plain(200, {})

    with stub_server(once_per_connection) as server:
        assert [kept.status for kept in fetch(server.url, times=3)] == [200] * 3
        assert server.num_connections == 3


def test_a_new_connection_that_is_closed_is_not_tried_for_ever() -> None:
    def never(method: str, path: str, body: Any) -> Iterator[bytes]:
        raise EOFError

    with stub_server(never) as server:
        with pytest.raises(Broken):
            fetch(server.url)
        assert server.num_connections == 1


def test_nobody_listening_is_said_in_the_systems_words() -> None:
    with stub_server() as server:
        url = server.url
    with pytest.raises(ConnectFailed, match="connection refused"):
        fetch(url)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A key and a certificate of its own for localhost."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(command, check=True, capture_output=True)
    return key, cert


def test_https_is_checked_against_the_systems_certificates(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, cert = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with stub_server(obliging, tls=context) as server:
        with pytest.raises(ConnectFailed, match=r"TLS: self.signed certificate"):
            fetch(server.url)
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        first, second = fetch(server.url, times=2)
        assert (first.status, second.body) == (200, first.body)


@pytest.mark.parametrize(
    ("text", "shown", "authority"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", "127.0.0.1:8000"),
        ("https://example.org/v1/", "https://example.org/v1", "example.org"),
        ("http://[::1]:80/x", "http://[::1]/x", "[::1]"),
    ],
)
def test_urls_are_read(text: str, shown: str, authority: str) -> None:
    assert (str(Url.parse(text)), Url.parse(text).authority) == (shown, authority)


@pytest.mark.parametrize(
    "text", ["127.0.0.1:8000", "ftp://x", "http://", "http://u:p@h", "http://h:99999", "http://h?x=1", "http://[::1"]
)
def test_what_is_no_url_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:8000|--api-key"):
        Url.parse(text)
