"""Who may set how much urgency: ordinary clients wait in line, whatever they send."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer
from real_engine import talk_to
from wire import CHAT, COMPLETIONS, HELLO, answer_of, error_of

from octavo.engine.async_engine import AsyncEngine

LOWEST, HIGHEST = -(2**31), 2**31 - 1


def ask(server: LiveServer, path: str, priority: int, key: str | None = None) -> httpx.Response:
    body: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return server.http.post(path, json={**body, "priority": priority}, headers=headers)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_client_may_step_back_but_not_push_ahead(start_server: Callable[..., Any], path: str) -> None:
    with start_server(api_key=("key",), admin_key=("root",)) as server:
        server.wait_until_ready()
        for priority in (0, 1, HIGHEST):
            answer_of(ask(server, path, priority, "key"))
            assert server.engine.requests[-1].priority == priority
        num_requests = len(server.engine.requests)
        for priority in (-1, LOWEST, LOWEST - 1, -(10**12)):
            error = error_of(ask(server, path, priority, "key"), 400)
            assert error["param"] == "priority"
            assert f"priority is {priority}" in error["message"]
            assert "0" in error["message"], "the limit"
            assert "admin" in error["message"], "the way out"
        assert len(server.engine.requests) == num_requests
        for priority in (LOWEST, -1, HIGHEST):
            answer_of(ask(server, path, priority, "root"))
            assert server.engine.requests[-1].priority == priority
        assert error_of(ask(server, path, LOWEST - 1, "root"), 400)["param"] == "priority"


def test_the_most_urgent_priority_is_configuration(start_server: Callable[..., Any]) -> None:
    with start_server(api_key=("key",), most_urgent_priority=-5) as server:
        server.wait_until_ready()
        answer_of(ask(server, COMPLETIONS, -5, "key"))
        assert "-5" in error_of(ask(server, COMPLETIONS, -6, "key"), 400)["message"]
    with start_server(api_key=("key",), most_urgent_priority=3) as server:
        server.wait_until_ready()
        assert error_of(ask(server, COMPLETIONS, 2, "key"), 400)["param"] == "priority"
        answer_of(ask(server, COMPLETIONS, 3, "key"))
        http = httpx.Client(base_url=server.url, headers={"authorization": "Bearer key"})
        with http:
            answer_of(http.post(COMPLETIONS, json={"prompt": "x"}))  # who asks for nothing gets the most that it may
        assert server.engine.requests[-1].priority == 3


def test_without_keys_a_loopback_client_is_an_admin_and_others_are_not(start_server: Callable[..., Any]) -> None:
    with start_server() as server:
        server.wait_until_ready()
        answer_of(ask(server, COMPLETIONS, LOWEST))
    with start_server(host="0.0.0.0") as server:
        server.wait_until_ready()
        assert error_of(ask(server, COMPLETIONS, -1), 400)["param"] == "priority"
    with start_server(admin_key=("root",)) as server:
        server.wait_until_ready()
        assert error_of(ask(server, COMPLETIONS, -1), 400)["param"] == "priority"
        answer_of(ask(server, COMPLETIONS, -1, "root"))


@pytest.mark.parametrize(
    ("route", "body"), [("/debug/lifecycle", {"prompt": "x"}), ("/debug/batch", {"prompts": ["x"]})]
)
def test_the_debug_routes_are_no_way_around(byte_level_path: Path, route: str, body: dict[str, Any]) -> None:
    async def talk(http: httpx.AsyncClient, engine: AsyncEngine) -> None:
        for key, status in (("key", 400), ("root", 200)):
            fields = {**body, "priority": -1, "max_tokens": 1}
            response = await http.post(route, json=fields, headers={"authorization": f"Bearer {key}"})
            assert response.status_code == status
        assert await engine.inspect(lambda loaded: loaded.scheduler.num_waiting) == 0

    talk_to(byte_level_path, talk, server={"api_key": ("key",), "admin_key": ("root",)})
