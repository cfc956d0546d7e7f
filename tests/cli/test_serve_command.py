"""What ``octavo serve`` tells the user."""

from __future__ import annotations

import json
import shlex

import pytest

from octavo.cli.console import facts_table, human_bytes
from octavo.cli.serve import access, curl_line, server_rows
from octavo.cli.summary import resolved_rows
from octavo.core.config import EngineConfig, ResolvedConfig, ServerConfig


@pytest.fixture
def config() -> ResolvedConfig:
    return ResolvedConfig(
        wish=EngineConfig(),
        model_path="/models/a [bold] name/" + "x" * 90 + ".gguf",
        model_name="tiny",
        backend="torch",
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        threads=2,
        max_model_len=2048,
        max_num_seqs=64,
        block_size=16,
        num_blocks=1000,
        kv_cache_bytes=3 << 29,
        vocab_size=100,
        eos_token_ids=frozenset({2}),
        system_fingerprint="octavo_0123456789ab",
        weights_bytes=98 << 20,
        notes=("first note", "second note"),
    )


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_says_everything_that_was_decided_within_the_terminal(config: ResolvedConfig, width: int) -> None:
    from io import StringIO

    from rich.console import Console

    out = StringIO()
    rows = resolved_rows(config) + server_rows(ServerConfig(), "http://127.0.0.1:8000")
    Console(file=out, width=width).print(facts_table("Ready", rows))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = out.getvalue()
    for said in ("tiny", "[bold]", "98.0 MiB", "torch on cpu, float32, 2 threads", "1,000 blocks x 16 = 16,000 tokens"):
        assert said in text
    for said in ("1.5 GiB", "2,048 tokens per sequence", "up to 64 sequences", "fcfs", "first note", "second note"):
        assert said in text
    assert "http://127.0.0.1:8000/v1" in text


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


def test_bytes_are_shown_in_the_unit_that_fits() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 98_362_432, 3 << 29, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "93.8 MiB",
        "1.5 GiB",
        "5.0 TiB",
    ]
