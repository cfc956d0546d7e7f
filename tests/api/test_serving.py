"""Starting, loading, draining, stopping."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from live_server import wait_for
from wire import CHAT, HELLO, answer_of, chat, complete, error_of, events_of

from octavo.api import bind, url
from octavo.core.config import ServerConfig
from octavo.core.errors import ConfigError, ModelFileError


def test_while_loading_everything_says_503_and_when_to_come_back(start_server: Callable[..., Any]) -> None:
    engine = FakeEngine()
    engine.holds_loading = True
    with start_server(engine) as server:
        for response in (
            server.http.get("/health"),
            server.http.get("/v1/models"),
            chat(server.http),
            chat(server.http, stream=True),
            complete(server.http),
        ):
            assert error_of(response, 503)["code"] == "engine_unavailable"
            assert int(response.headers["retry-after"]) >= 1
        engine.holds_loading = False
        server.wait_until_ready()
        assert answer_of(server.http.get("/health")) == {"status": "ready"}
        assert server.http.head("/health").status_code == 200
        answer_of(chat(server.http))


def test_a_model_that_does_not_load_ends_the_server_with_its_error(start_server: Callable[..., Any]) -> None:
    engine = FakeEngine()
    engine.load_error = ModelFileError("the file is damaged")
    with start_server(engine) as server:
        server.join()
        assert isinstance(server.error, ModelFileError)


def test_a_dead_engine_is_a_503_that_says_why(start_server: Callable[..., Any]) -> None:
    with start_server() as server:
        server.wait_until_ready()
        server.engine.die("the kernel panicked")
        for response in (server.http.get("/health"), chat(server.http)):
            assert "the kernel panicked" in error_of(response, 503)["message"]


def test_streams_open_when_the_engine_dies_end_with_an_error_and_done(start_server: Callable[..., Any]) -> None:
    with start_server() as server:
        server.wait_until_ready()
        server.engine.step_s = 0.02
        running = BackgroundChat(server.http, max_tokens=400)
        server.engine.die("boom")
        running.join()
        assert running.events[-1]["error"]["code"] == "engine_unavailable"
        assert "boom" in running.events[-1]["error"]["message"]


def test_a_port_in_use_says_so() -> None:
    with bind(ServerConfig(port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            bind(ServerConfig(port=port))


def test_an_address_that_is_not_ours_says_so() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
        bind(ServerConfig(host="192.0.2.1", port=0))
    with pytest.raises(ConfigError, match=r"cannot listen on no\.such\.host\.invalid:0"):
        bind(ServerConfig(host="no.such.host.invalid", port=0))


def test_the_url_is_one_that_this_machine_can_open() -> None:
    for host, shown in (("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("localhost", "localhost")):
        config = ServerConfig(host=host, port=0)
        with bind(config) as sock:
            assert url(sock, config) == f"http://{shown}:{sock.getsockname()[1]}"


SERVER_PROGRAM = """
import logging, sys
sys.path.insert(0, {here!r})
from fake_engine import FakeEngine
from octavo.api import serve
from octavo.core.config import ServerConfig

logging.basicConfig(level="INFO")
engine = FakeEngine()
engine.step_s = 0.02
serve(engine, ServerConfig(port=0, drain_s={drain_s}), on_ready=lambda url: print(url, flush=True))
print("stopped cleanly", flush=True)
"""


@contextmanager
def server_process(drain_s: float) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    program = SERVER_PROGRAM.format(here=str(Path(__file__).parent), drain_s=drain_s)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        assert process.stdout is not None
        with httpx.Client(base_url=process.stdout.readline().strip(), timeout=60) as http:
            yield process, http
    finally:
        process.kill()
        process.communicate()


class BackgroundChat(threading.Thread):
    """A streamed chat that has begun to answer."""

    def __init__(self, http: httpx.Client, max_tokens: int) -> None:
        super().__init__()
        self.http, self.max_tokens = http, max_tokens
        self.events: list[Any] = []
        self._has_begun = threading.Event()
        self.start()
        assert self._has_begun.wait(60)

    def run(self) -> None:
        body = {"messages": HELLO, "stream": True, "ignore_eos": True, "max_tokens": self.max_tokens}
        with self.http.stream("POST", CHAT, json=body) as response:
            content = b""
            for piece in response.iter_bytes():
                content += piece
                self._has_begun.set()
        self.events = events_of(httpx.Response(response.status_code, headers=response.headers, content=content))


def test_draining_lets_running_requests_finish_and_answers_new_ones_with_503(start_server: Callable[..., Any]) -> None:
    with start_server() as server:
        server.wait_until_ready()
        server.engine.step_s = 0.02
        running = BackgroundChat(server.http, max_tokens=400)
        server.server.handle_exit(signal.SIGTERM, None)
        assert wait_for(lambda: server.http.get("/health").status_code == 503)
        response = chat(server.http)
        assert "shutting down" in error_of(response, 503)["message"]
        assert response.headers["retry-after"]
        server.engine.step_s = 0.0  # all has been seen: now it may end soon
        running.join()
        assert running.events[-1]["choices"][0]["finish_reason"] == "length"
        server.join()
        assert server.error is None


def test_what_does_not_finish_while_draining_ends_with_an_error(start_server: Callable[..., Any]) -> None:
    with start_server(drain_s=0.1) as server:
        server.wait_until_ready()
        server.engine.step_s = 0.02
        running = BackgroundChat(server.http, max_tokens=400)
        server.server.handle_exit(signal.SIGTERM, None)
        running.join()
        assert running.events[-1]["error"]["code"] == "engine_unavailable"
        server.join()
        assert server.error is None


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_running_requests_finish_and_new_ones_get_503(sent: signal.Signals) -> None:
    with server_process(drain_s=20) as (process, http):
        running = BackgroundChat(http, max_tokens=60)
        process.send_signal(sent)
        assert wait_for(lambda: http.get("/health").status_code == 503)
        response = chat(http)
        assert "shutting down" in error_of(response, 503)["message"]
        assert response.headers["retry-after"]
        running.join()
        assert running.events[-1]["choices"][0]["finish_reason"] == "length"
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "stopped cleanly" in out
        assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("reason", ["the time to drain is over", "a second signal came"])
def test_requests_that_do_not_finish_end_with_an_error(reason: str) -> None:
    second = reason == "a second signal came"
    with server_process(drain_s=60 if second else 0.2) as (process, http):
        running = BackgroundChat(http, max_tokens=400)  # 8 s: its error says that nobody waited for its end
        process.send_signal(signal.SIGINT)
        if second:
            assert wait_for(lambda: http.get("/health").status_code == 503)  # the first has been taken
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, "stopped cleanly" in out) == (0, True)
        assert "Traceback" not in err
        assert "uvicorn.access" not in err
        running.join()
        assert running.events[-1]["error"]["code"] == "engine_unavailable"


def test_a_public_bind_without_keys_warns(caplog: pytest.LogCaptureFixture) -> None:
    from octavo.api import server as module

    class Stop(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Stop

    patch = pytest.MonkeyPatch()
    with patch.context() as context, socket.socket() as unused:
        context.setattr(module, "Server", stop)
        for config, warns in (
            (ServerConfig(host="0.0.0.0"), True),
            (ServerConfig(host="0.0.0.0", api_key=("k",)), False),
            (ServerConfig(), False),
        ):
            caplog.clear()
            with pytest.raises(Stop):
                module.serve(FakeEngine(), config, sock=unused)
            assert ("without an API key" in caplog.text) == warns
