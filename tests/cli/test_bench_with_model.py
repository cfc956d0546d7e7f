"""``octavo bench`` on the default model: its tables, and that its figures follow from the samples that it keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.cli.main import app
from octavo.core.errors import ConfigError

pytestmark = pytest.mark.slow

SMALL = ("--max-num-seqs", "2", "--max-model-len", "128", "--kv-cache-memory", "64MiB")


def bench(*words: str) -> Any:
    return CliRunner(env={"COLUMNS": "180"}).invoke(app, ["bench", *words])


def test_throughput_figures_follow_from_the_steps_that_it_keeps(model_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "throughput.json"
    done = bench(
        "throughput", str(model_path), *SMALL, "--streams", "1,3", "--context", "40", "--output-tokens", "4",
        "--prefill", "50", "--repeats", "2", "--json", str(file),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    assert result["host"]["cpu"]
    assert result["config"]["max_num_seqs"] == 3  # room for the streams asked for
    one, three, prefill = result["cases"]
    assert [case["name"] for case in result["cases"]] == ["1 stream at 40", "3 streams at 40", "prefill of 50"]
    for case in (one, three):
        assert case["name"] in done.stdout
        assert [len(repeat["steps"]) for repeat in case["repeats"]] == [4, 4]
        assert {step["tokens"] for repeat in case["repeats"] for step in repeat["steps"]} == {case["streams"]}
        assert abs(case["mean_context"] - 40) <= 3
    assert [sum(step["tokens"] for step in repeat["steps"]) for repeat in prefill["repeats"]] == [50, 50]
    for case in result["cases"]:
        rates = []
        for repeat in case["repeats"]:
            steps = repeat["steps"]
            assert all(step["wall_s"] > step["forward_s"] + step["sample_s"] > 0 for step in steps)
            rates.append(sum(step["tokens"] for step in steps) / sum(step["wall_s"] for step in steps))
            assert repeat["tokens_per_s"] == pytest.approx(rates[-1])
        assert case["tokens_per_s"] == pytest.approx(sum(rates) / 2)  # the median of two
    if result["config"]["backend"] == "native":
        assert one["bound_s"] * 3 > three["bound_s"] > one["bound_s"] > 0
        assert one["share_of_bound"] == pytest.approx(one["tokens_per_s"] * one["bound_s"])


def test_latency_keeps_every_token_time(model_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "latency.json"
    done = bench(
        "latency", str(model_path), *SMALL, "--num-requests", "4", "--concurrency", "2", "--prompt-tokens", "5:20",
        "--output-tokens", "3", "--json", str(file),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "4 requests, 2 clients: 12 tokens" in done.stdout
    result = json.loads(file.read_text())
    assert [len(request["token_times_s"]) for request in result["requests"]] == [3] * 4
    assert result["latencies"]["ttft_s"]["count"] == 4
    assert result["workload"]["prompt_tokens"] == {"low": 5, "high": 20}


def test_cases_that_do_not_fit_are_refused_by_name(model_path: Path) -> None:
    too_long = bench("throughput", str(model_path), *SMALL, "--context", "120", "--output-tokens", "20")
    assert isinstance(too_long.exception, ConfigError)
    assert "is 140 but max_model_len is 128" in str(too_long.exception)
    too_many = bench(
        "throughput", str(model_path), "--streams", "64", "--kv-cache-memory", "16MiB", "--output-tokens", "4"
    )
    assert isinstance(too_many.exception, ConfigError)
    assert "raise --kv-cache-memory" in str(too_many.exception)
