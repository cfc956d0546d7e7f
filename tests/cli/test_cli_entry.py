"""The ``octavo`` command as a whole: what it loads, how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo import __version__
from octavo.cli import main as cli_main
from octavo.cli.main import app

HEAVY = ("numpy", "torch", "transformers", "fastapi", "uvicorn", "huggingface_hub", "jinja2", "tokenizers", "rich")


@pytest.mark.parametrize(
    "words",
    [["--help"], ["serve", "--help"], ["chat", "--help"], ["bench", "latency", "--help"], ["bench", "serve", "--help"]],
)
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys\nfrom octavo.cli.main import app\n"
        f"try:\n    app({words!r})\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: ")
    assert done.stderr.strip() == "[]"


def test_both_ways_to_ask_for_the_version_agree() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"octavo {__version__}\n"
    assert CliRunner().invoke(app, ["version"]).stdout == f"octavo {__version__}\n"


def run_main(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["octavo", *words])
    with pytest.raises(SystemExit) as caught:
        cli_main.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["serve", "./nowhere.gguf"], "nowhere.gguf"),
        (["complete", "--model", "./nowhere.gguf", "Hello"], "nowhere.gguf"),
        (["chat", "--config", "nowhere.toml"], "cannot read the config file nowhere.toml"),
        (["rm", "--yes", "no-such-model"], "no model 'no-such-model'"),
        (["rm", "no-such-model"], "no model 'no-such-model'"),
    ],
)
def test_what_cannot_be_done_is_one_plain_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], complaint: str
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    if words[0] == "serve":
        words = [*words, "--port", "0", "--log-level", "error"]
    assert run_main(monkeypatch, *words) == 1
    out, err = capfd.readouterr()
    *before, last = err.splitlines()
    assert last.startswith("octavo: ")
    assert complaint in last
    assert all(line.startswith("octavo ") for line in before)  # "octavo 0.1.0: loading ..."
    assert out == ""


def test_debug_shows_where_an_error_came_from(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    level = cli_main.logger.level
    try:
        assert run_main(monkeypatch, "--debug", "chat", "--config", "nowhere.toml") == 1
    finally:
        cli_main.logger.setLevel(level)
    err = capfd.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("octavo: cannot read the config file")


def test_models_are_listed_as_a_table_and_as_json_and_can_be_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    runner = CliRunner(env={"COLUMNS": "120"})
    empty = runner.invoke(app, ["models"])
    assert (empty.stdout, "octavo pull" in empty.stderr) == ("", True)
    assert runner.invoke(app, ["models", "--json"]).stdout == "[]\n"

    file = tmp_path / "packages" / "tiny.gguf"
    file.parent.mkdir()
    file.write_bytes(bytes(2048))
    assert json.loads(runner.invoke(app, ["models", "--json"]).stdout) == [
        {"name": "tiny", "bytes": 2048, "path": str(file), "source": "package"}
    ]
    table = runner.invoke(app, ["models"]).stdout
    assert "tiny" in table
    assert "2.0 KiB" in table

    refused = runner.invoke(app, ["rm", "tiny"], input="n\n")
    assert (refused.exit_code, file.exists()) == (1, True)
    removed = runner.invoke(app, ["rm", "tiny"], input="y\n")
    assert (removed.exit_code, file.exists()) == (0, False)
    assert removed.stdout.endswith("freed 2.0 KiB\n")


def test_wrong_sampling_flags_are_usage_errors_before_anything_is_loaded() -> None:
    done = CliRunner().invoke(app, ["complete", "--temperature", "-1", "Hello"])
    assert done.exit_code == 2
    assert "temperature is -1.0 but must be from 0 to 100" in done.stderr
