"""``octavo bench serve`` against ``octavo serve`` with the default model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.cli.main import app

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(model_path: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "octavo", "serve", str(model_path), "--port", "0", "--max-model-len", "1024"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        found = next(match for line in process.stdout if (match := re.search(r"http://127\.0\.0\.1:\d+", line)))
        yield found[0]
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.parametrize(
    "words", [(), ("--endpoint", "chat", "--shared-prefix", "100"), ("--rate", "20", "--token-ids")]
)
def test_every_token_of_a_real_server_is_counted(url: str, tmp_path: Path, words: tuple[str, ...]) -> None:
    file = tmp_path / "out.json"
    sizes = ("--num-requests", "6", "--prompt-tokens", "40", "--output-tokens", "12", "--concurrency", "3")
    sizes = sizes[:-2] if "--rate" in words else sizes
    command = ["bench", "serve", "--url", url, *sizes, *words, "--json", str(file)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, (done.output, done.exception)
    result = json.loads(file.read_text())
    assert result["server"]["notes"] == []
    asked = 140 if "chat" in words else 40
    for request in result["requests"]:
        assert request["completion_tokens"] == 12
        assert abs(request["prompt_tokens"] - asked) <= (5 if "chat" in words else 0)
        assert request["finish_reason"] == "length"
        if "--token-ids" in words:
            assert sum(request["event_tokens"]) == 12
    if "chat" in words:
        assert result["totals"]["cached_tokens"] > 100
