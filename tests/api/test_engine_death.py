"""An engine whose thread ends takes the server with it, once its streams have been told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import httpx
import pytest
from live_server import LiveServer, wait_for

from engine.test_async_engine import Runner, load
from octavo.core.config import EngineConfig, ServerConfig
from octavo.core.errors import EngineUnavailable
from octavo.core.request import Submission
from octavo.core.sampling_params import SamplingParams
from octavo.engine.async_engine import AsyncEngine

BODY = {"prompt": [1, 2, 3], "max_tokens": 50, "stream": True}


def serve_and_die(told: Callable[[LiveServer, list[str]], None], **config: Any) -> BaseException | None:
    """Start a stream, end the engine's thread, and let ``told`` look at what the client got -> how the server ended."""
    runner = Runner()
    engine = AsyncEngine(EngineConfig(block_size=4), load=load(runner))
    server = LiveServer(cast(Any, engine), ServerConfig(port=0, **config))
    try:
        server.wait_until_ready()
        runner.gate.clear()
        with server.http.stream("POST", "/v1/completions", json=BODY) as answer:
            assert runner.waiting.wait(5)
            runner.dies = True
            runner.gate.set()
            lines = list(answer.iter_lines())
        told(server, lines)
    finally:
        runner.gate.set()
        server.close()
    return server.error


def test_the_server_ends_with_an_error_after_its_streams_were_told(caplog: pytest.LogCaptureFixture) -> None:
    def told(server: LiveServer, lines: list[str]) -> None:
        assert '"type":"server_error"' in lines[0]
        assert "the engine is dead" in lines[0]
        server.join()  # by itself
        with pytest.raises(httpx.ConnectError):
            server.http.get("/health")

    error = serve_and_die(told)
    assert isinstance(error, EngineUnavailable), "which the command line turns into exit code 1"
    assert "the engine died: SystemExit: the thread dies" in str(error)


def test_a_server_that_is_to_stay_says_503_from_then_on() -> None:
    def told(server: LiveServer, lines: list[str]) -> None:
        assert "the engine is dead" in lines[0]
        for _ in range(3):
            answer = server.http.get("/health")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
        assert not wait_for(lambda: server.server.should_exit, 0.3)

    assert serve_and_die(told, exit_on_engine_death=False) is None


def test_a_server_that_is_asked_to_stop_ends_well_though_its_engine_is_then_dead() -> None:
    engine = AsyncEngine(EngineConfig(block_size=4), load=load(Runner()))
    server = LiveServer(cast(Any, engine), ServerConfig(port=0, drain_s=0))
    server.wait_until_ready()
    assert server.server._loop is not None
    server.server._loop.call_soon_threadsafe(server.server._begin, 0.0)
    server.join()
    server.http.close()
    assert server.error is None
    assert engine.state == "dead"


def test_a_thread_whose_death_cannot_be_told_at_once_tells_it_later() -> None:
    async def run() -> None:
        runner = Runner()
        engine = AsyncEngine(EngineConfig(block_size=4), load=load(runner))
        await engine.start()
        loop = asyncio.get_running_loop()
        real, left = loop.call_soon_threadsafe, 2

        def short_of_memory(*args: Any) -> Any:
            nonlocal left
            left -= 1
            if left >= 0:
                raise MemoryError
            return real(*args)

        loop.call_soon_threadsafe = short_of_memory  # type: ignore[method-assign, assignment]
        runner.dies = True
        stream = engine.submit(Submission(request_id="r", prompt_token_ids=[1], sampling=SamplingParams(max_tokens=3)))
        with pytest.raises(EngineUnavailable, match="the thread dies"):
            async for _ in stream:
                pass
        assert engine.state == "dead"
        await engine.stop()

    asyncio.run(run())
