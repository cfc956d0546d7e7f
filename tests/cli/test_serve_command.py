"""What ``octavo serve`` tells the user."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from octavo.cli.console import human_bytes
from octavo.cli.serve import access, curl_line
from octavo.core.config import ResolvedConfig, ServerConfig


def test_an_open_door_is_said_loudly_and_a_closed_one_is_not() -> None:
    assert access(ServerConfig()) == "programs on this machine"
    assert "WITHOUT A KEY" in access(ServerConfig(host="0.0.0.0"))
    assert "WITHOUT" not in access(ServerConfig(host="0.0.0.0", api_key=("k",)))


@pytest.mark.parametrize("server", [ServerConfig(), ServerConfig(served_model_name="it's", api_key=("secret",))])
def test_the_suggested_request_is_a_valid_shell_line_that_shows_no_key(
    config: ResolvedConfig, server: ServerConfig
) -> None:
    line = curl_line(config, server, "http://127.0.0.1:8000")
    words = shlex.split(line)
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == (server.served_model_name or "tiny")
    assert body["messages"][0]["role"] == "user"
    assert "secret" not in line
    assert ("Authorization: Bearer $KEY" in words) == bool(server.api_key)


def test_a_model_that_holds_no_chats_is_asked_for_a_completion(config: ResolvedConfig) -> None:
    line = curl_line(replace(config, chat_template="missing"), ServerConfig(), "http://127.0.0.1:8000")
    words = shlex.split(line)
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/completions"]
    assert json.loads(words[words.index("-d") + 1]) == {"model": "tiny", "prompt": "A hawk is"}
    wished = replace(config, wish=replace(config.wish, chat_template="missing.jinja"), chat_template="missing.jinja")
    assert "chat/completions" in curl_line(wished, ServerConfig(), "http://127.0.0.1:8000")


def test_bytes_are_shown_in_the_unit_that_fits() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 98_362_432, 3 << 29, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "93.8 MiB",
        "1.5 GiB",
        "5.0 TiB",
    ]
