"""A live server on a loopback port around the fake engine."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from fake_engine import FakeEngine

from octavo.api.app import create_app
from octavo.api.server import Server, bind, url
from octavo.core.config import ServerConfig


class LiveServer:
    """A server in a thread. ``http`` talks to it; ``engine`` has the knobs."""

    def __init__(self, engine: FakeEngine, config: ServerConfig) -> None:
        self.engine, self.config = engine, config
        self._sock = bind(config)
        self.url = url(self._sock, config)
        self.port: int = self._sock.getsockname()[1]
        self.server = Server(create_app(engine, config), engine, config)
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=60, verify=False)  # no TLS: skip its set-up

    def _run(self) -> None:
        try:
            asyncio.run(self.server.run_until_stopped(self._sock, lambda _: self.ready.set()))
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.error = error

    def set_send_buffer(self, num_bytes: int) -> None:
        """Of connections to come."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_bytes)

    def wait_until_ready(self) -> None:
        assert self.ready.wait(60)

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self.join()


@contextmanager
def running_server(engine: FakeEngine | None = None, **config: Any) -> Iterator[LiveServer]:
    server = LiveServer(engine or FakeEngine(), ServerConfig(port=0, **config))
    try:
        yield server
    finally:
        server.close()


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
