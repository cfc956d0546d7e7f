"""Servers around the fake engine: one per module, or one of a test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from live_server import LiveServer, running_server


@pytest.fixture(scope="module")
def shared_server() -> Iterator[LiveServer]:
    with running_server() as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def server(shared_server: LiveServer) -> LiveServer:
    shared_server.engine.reset()
    return shared_server


@pytest.fixture
def start_server() -> Callable[..., AbstractContextManager[LiveServer]]:
    return running_server
