"""What a client is told whose request drew no token: its own fault is a 400, numbers gone bad are a 500."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import pytest
from live_server import LiveServer

from engine.test_async_engine import Runner, load
from octavo.core.config import EngineConfig, ServerConfig
from octavo.engine.async_engine import AsyncEngine

MASKS = {"prompt": [1, 2, 3], "max_tokens": 9, "allowed_token_ids": [1], "min_tokens": 2}


class EveryRequest(set[str]):
    """Holds whatever one asks for."""

    def __contains__(self, name: object) -> bool:
        return True


@pytest.fixture
def failing() -> Iterator[tuple[LiveServer, Runner]]:
    """A server whose every draw fails, as its runner's ``failure`` says."""
    runner = Runner()
    runner.bad_rows = EveryRequest()
    server = LiveServer(cast(Any, AsyncEngine(EngineConfig(block_size=4), load=load(runner))), ServerConfig(port=0))
    server.wait_until_ready()
    yield server, runner
    server.close()


@pytest.mark.parametrize("n", [1, 3])
def test_masks_that_leave_nothing_are_a_400_that_names_them(failing: tuple[LiveServer, Runner], n: int) -> None:
    server, runner = failing
    runner.failure = "no_token_left"
    answer = server.http.post("/v1/completions", json={**MASKS, "n": n})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (400, "invalid_request_error", "no_token_left")
    assert "allowed_token_ids and min_tokens left no token to draw" in error["message"]


def test_in_a_stream_the_same_error_is_an_event(failing: tuple[LiveServer, Runner]) -> None:
    server, runner = failing
    runner.failure = "no_token_left"
    with server.http.stream("POST", "/v1/completions", json={**MASKS, "stream": True}) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    error = json.loads(events[0])["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "no_token_left")
    assert "allowed_token_ids and min_tokens left no token to draw" in error["message"]
    assert events[1:] == ["[DONE]"]


def test_numbers_that_are_not_finite_stay_a_500(failing: tuple[LiveServer, Runner]) -> None:
    server, _ = failing
    answer = server.http.post("/v1/completions", json=MASKS)
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert "not finite" in answer.json()["error"]["message"]
