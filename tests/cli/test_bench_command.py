"""``octavo bench``: its flags and its tables, without a model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from octavo.cli.bench import latency_table, throughput_table
from octavo.cli.bench_throughput import CaseResult, Repeat, StepSample
from octavo.cli.flags import with_config
from octavo.cli.main import app
from octavo.cli.report import save
from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("latency", "--request-rate", "2", "--concurrency", "3"), "exclude each other"),
        (("latency", "--prompt-tokens", "9:1"), "32:512 for a range"),
        (("latency", "--enable-prefix-caching"), "No such option"),
        (("throughput", "--streams", "1,x"), "not a list of whole numbers"),
        (("throughput", "--streams", "none", "--prefill", "none"), "nothing is left to measure"),
        (("throughput", "--chunk-size", "5"), "No such option"),
        (("throughput", "--repeats", "0"), "greater than or equal to 1"),
    ],
)
def test_wrong_flags_are_usage_errors_before_anything_is_loaded(words: tuple[str, ...], complaint: str) -> None:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", *words])
    assert done.exit_code == 2
    assert complaint in done.stderr


def test_a_field_that_a_command_decides_itself_comes_neither_from_a_flag_nor_from_the_file(tmp_path: Path) -> None:
    seen: list[EngineConfig] = []

    @with_config(omit=("enable_prefix_caching",))
    def command(engine: EngineConfig) -> None:
        """Keep the config."""
        seen.append(engine)

    file = tmp_path / "octavo.toml"
    file.write_text("enable_prefix_caching = false\nblock_size = 8\n")
    small = typer.Typer()
    small.command()(command)
    assert CliRunner().invoke(small, ["--config", str(file)]).exit_code == 0
    assert (seen[0].enable_prefix_caching, seen[0].block_size) == (True, 8)
    assert CliRunner().invoke(small, ["--no-enable-prefix-caching"]).exit_code == 2


def case(rates: list[float], **changes: Any) -> CaseResult:
    step = StepSample(wall_s=0.010, build_s=0.001, forward_s=0.006, sample_s=0.001, tokens=8, context=256.0)
    fields: dict[str, Any] = {
        "kind": "decode",
        "streams": 8,
        "context": 256,
        "mean_context": 256.0,
        "repeats": [Repeat(steps=[step], tokens_per_s=rate) for rate in rates],
        "bound_s": 0.002,
        "limit": "memory",
    }
    return CaseResult(**(fields | changes))


def test_the_throughput_table_shows_medians_their_range_and_the_share_of_the_best_possible() -> None:
    table = throughput_table([case([900.0, 1000.0, 700.0])], "title")
    assert dict(zip(table.headings, table.rows[0], strict=True)) == {
        "case": "8 streams at 256",
        "tokens/s": "900.0",
        "min - max": "700.0 - 1,000.0",
        "best possible": "4,000 (memory)",
        "reached": "22 %",
        "step ms": "10.00",
        "forward ms": "6.00",
        "sample ms": "1.00",
        "rest ms": "3.00",
    }


def test_a_prefill_is_counted_by_its_prompt_and_without_a_bound_there_is_no_share() -> None:
    prefill = case([5000.0], kind="prefill", streams=1, context=4096, bound_s=0.5)
    assert (prefill.name, prefill.bound_tokens_per_s) == ("prefill of 4,096", 8192)
    unknown = case([5000.0], bound_s=None, limit="")
    assert (unknown.bound_tokens_per_s, unknown.share_of_bound) == (None, None)
    assert list(throughput_table([unknown], "title").rows[0][3:5]) == ["-", "-"]


def test_the_latency_table_shows_what_there_is() -> None:
    found = {"count": 3.0, "mean": 0.5, "p50": 0.4, "p90": 0.8, "p99": 0.9, "max": 1.2}
    ttft, tpot, _ = latency_table({"ttft_s": found, "tpot_s": None, "itl_s": None}, "title").rows
    assert list(ttft) == ["TTFT", "3", "500.0", "400.0", "800.0", "900.0", "1,200.0"]
    assert list(tpot) == ["TPOT", "0", "-", "-", "-", "-", "-"]


def test_samples_that_cannot_be_written_are_an_error_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file" / "samples.json"):
        with pytest.raises(ConfigError, match=f"cannot write {re.escape(str(place))}"):
            save(place, {})
