"""Every table of the command line, on terminals of several widths and through a pipe."""

from __future__ import annotations

import dataclasses
import io
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from octavo.cli.bench import latency_table, throughput_table
from octavo.cli.bench_throughput import CaseResult, Repeat, StepSample
from octavo.cli.bound import bound_table, speed_rows
from octavo.cli.doctor import host_rows
from octavo.cli.host import Host
from octavo.cli.models import models_table
from octavo.cli.serve import server_rows
from octavo.cli.summary import resolved_rows
from octavo.cli.tables import Table, facts_table, show, show_line
from octavo.core.config import ResolvedConfig, ServerConfig
from octavo.hub.cache import CachedModel
from octavo.kernels.base import MachineSpeed, ModelCost

BOX = "\u256d\u256e\u2570\u256f\u2502\u2500\u251c\u2524\u252c\u2534\u253c"
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
COST = ModelCost(
    head_bytes=9_000_000, table_bytes=77, layer_bytes=98_000_000, kv_bytes=46_080, float_macs=1_000,
    quantised_macs=134_000_000, head_macs=28_000_000, head_is_quantised=True, attention_macs=1_152,
    windows=(None,),
)  # fmt: skip
SPEED = MachineSpeed(
    read_bytes_per_s=((1 << 20, 190.4e9), (16 << 20, 80.2e9), (256 << 20, 21.3e9)),
    macs_per_s={"float32": 100.1e9, "bf16": 500.2e9, "int8": 2000.3e9},
)


def throughput_cases() -> list[CaseResult]:
    step = StepSample(wall_s=12.34567, build_s=0.001, forward_s=11.2, sample_s=0.10101, tokens=8, context=256.0)
    return [
        CaseResult(
            kind=kind, streams=64, context=context, mean_context=256.0, bound_s=0.0015, limit=limit,
            repeats=[Repeat(steps=[step], tokens_per_s=rate) for rate in (98_765.4, 101_234.5, 111_222.3)],
        )
        for kind, context, limit in (("decode", 256, "memory"), ("prefill", 131_072, "arithmetic"))
    ]  # fmt: skip


@pytest.fixture(
    params=["throughput", "latency", "bound", "speed", "host", "serve", "models", "hostile"],
)
def table(request: pytest.FixtureRequest, config: ResolvedConfig) -> Table:
    latencies = dict.fromkeys(("mean", "p50", "p90", "p99", "max"), 1234.5678) | {"count": 1_000_000.0}
    host = Host(
        cpu="AMD EPYC 7571 with a long name, as vendors like them, and a clock of 2.2 GHz", isa=("avx", "fma", "avx2"),
        cores=4, machine_cores=64, free_bytes=8 << 30, total_bytes=16 << 30, load_1min=0.1, system="Linux" + " 5" * 40,
        python="CPython 3.11",
    )  # fmt: skip
    deep = Path("/cache/" + "folder/" * 20 + "model.gguf")
    held = [CachedModel(name="somebody/" + "a-long-name-" * 4 + "GGUF", num_bytes=98 << 30, path=deep, source="hub")]
    hostile = [dataclasses.replace(held[0], name="x\x1b[2J\n[red]y\u202e", path=Path("/a\nb\x07c"))]
    match request.param:
        case "throughput":
            return throughput_table(throughput_cases(), "a model, native, 2 threads, numerics exact, KV bfloat16")
        case "latency":
            return latency_table({"ttft_s": latencies, "tpot_s": latencies, "itl_s": None}, "a model, native")
        case "bound":
            return bound_table(COST, SPEED, max_model_len=1 << 20, chunk=2048)
        case "speed":
            return facts_table("Measured", speed_rows(SPEED))
        case "host":
            return facts_table("Found", host_rows(host))
        case "serve":
            rows = resolved_rows(config) + server_rows(ServerConfig(host="0.0.0.0"), "http://127.0.0.1:8000")
            return facts_table("Ready after 1.2 s", rows, alarming=("access",))
        case "models":
            return models_table(held)
    return models_table(hostile)


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def squeezed(text: str) -> str:
    return "".join(ESCAPES.sub("", text).split())


def printable(cell: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in cell)


def columns_of(screen: str) -> list[str]:
    """The text of each drawn column, folded lines joined, of all groups one after the other."""
    columns: list[str] = []
    group: list[str] = []
    for line in screen.splitlines():
        if line.startswith("\u2502"):
            cells = line.strip("\u2502").split("\u2502")
            group = group or [""] * len(cells)
            group = [sofar + cell for sofar, cell in zip(group, cells, strict=True)]
        elif line.startswith("\u2570"):
            columns += group
            group = []
    return list(map(squeezed, columns))


@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_terminal_shows_every_cell_whole_within_its_width(
    table: Table, width: int, colour: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")
    screen = Screen()
    show(table, out=screen)
    written = screen.getvalue()
    shown = ESCAPES.sub("", written)
    assert "\u2026" not in shown
    assert max(map(len, shown.splitlines())) <= width
    assert "\x1b" not in shown
    if not colour:
        assert not re.search(r"\x1b\[[0-9;]*3[0-9]", written), "a colour"
    found = columns_of(shown)
    for index in range(len(table.rows[0])):
        cells = [*([table.headings[index]] if table.headings else []), *(row[index] for row in table.rows)]
        assert squeezed("".join(map(printable, cells))) in found
    for row in table.rows:
        for index, cell in enumerate(row):
            if index not in table.text:
                assert cell in shown, "a figure is never broken"


def test_through_a_pipe_a_row_is_a_line_of_plain_text(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    out = io.StringIO()
    show(table, out=out)
    text = out.getvalue()
    assert text.endswith("\n")
    lines = text.removesuffix("\n").split("\n")
    assert all(line.isprintable() for line in lines), "no control characters"
    assert not set(BOX + "\u2026") & set(text)
    assert len(lines) == bool(table.title) + bool(table.headings) + len(table.rows)
    for line, row in zip(lines[-len(table.rows) :], table.rows, strict=True):
        assert split_cells(line, row) == [printable(cell) for cell in row]


def split_cells(line: str, row: Sequence[str]) -> list[str]:
    """The cells of a line, found from left to right with nothing but spaces between them."""
    found = []
    for cell in map(printable, row):
        line = line.lstrip(" ")
        assert line.startswith(cell.lstrip(" ")), (line, cell)
        found.append(cell)
        line = line[len(cell.lstrip(" ")) :]
        assert not line or line.startswith("  ") or cell == row[-1], "columns are two spaces apart at least"
    assert line == ""
    return found


def test_a_narrow_terminal_gets_further_columns_below_with_the_first_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    screen = Screen()
    show(throughput_table(throughput_cases(), "title"), out=screen)
    shown = ESCAPES.sub("", screen.getvalue())
    assert shown.count("\u2570") == shown.count("64 streams at 256") > 1
    assert shown.count("title") == 1


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_finding_keeps_its_mark_and_its_text(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = "the engine does not start: " + "/a/long/path" * 20 + " [red]\x1b[2J"
    screen, pipe = Screen(), io.StringIO()
    for out in (screen, pipe):
        show_line("FAIL", text, style="bold red", out=out)
    shown = ESCAPES.sub("", screen.getvalue())
    assert squeezed(shown) == squeezed("FAIL" + printable(text))
    assert max(map(len, shown.splitlines())) <= width
    assert pipe.getvalue() == f"FAIL  {printable(text)}\n"


def test_a_command_writes_plain_text_into_a_pipe(tmp_path: Path) -> None:
    file = tmp_path / "packages" / "tiny.gguf"
    file.parent.mkdir()
    file.write_bytes(bytes(2048))
    env = {"OCTAVO_CACHE": str(tmp_path), "FORCE_COLOR": "1", "COLUMNS": "20", "PATH": ""}
    command = [sys.executable, "-m", "octavo", "models"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert done.stdout.splitlines()[1].split() == ["tiny", "2.0", "KiB", "package", str(file)]
