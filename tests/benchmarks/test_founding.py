"""The founding benchmark: its arithmetic by hand, and the whole of it on a model small enough for a test."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from weights.test_dummy import shape_folder

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import benchmark
from founding_report import Round, Sample, agreement, figures, ratios


def one_by_one() -> Round:
    """Two requests of three tokens, one token a second, the second after the first."""
    first = Sample(prompt_tokens=4, token_ids=[1, 2, 3], start_s=0.0, first_s=2.0, last_s=4.0)
    second = Sample(prompt_tokens=4, token_ids=[1, 2, 4], start_s=4.0, first_s=6.0, last_s=8.0)
    return Round(wall_s=8.0, samples=[first, second])


def all_at_once() -> Round:
    both = [
        Sample(prompt_tokens=4, token_ids=ids, start_s=0.0, first_s=1.0, last_s=2.0, cached_tokens=cached)
        for ids, cached in (([1, 2, 3], 0), ([1, 9, 4], 2))
    ]
    return Round(wall_s=2.0, samples=both)


def test_ttft_counts_from_arrival_and_tpot_from_the_first_token() -> None:
    theirs, ours = figures([one_by_one()]), figures([all_at_once()])
    assert theirs == {
        "wall_s": 8.0,
        "tokens_per_s": 6 / 8,
        "mean_ttft_s": 4.0,
        "mean_own_ttft_s": 2.0,
        "mean_tpot_s": 1.0,
        "mean_cached_tokens": 0.0,
    }
    assert ours["mean_cached_tokens"] == 1.0
    assert ratios(theirs, ours) == {"wall_s": 4.0, "mean_ttft_s": 4.0, "mean_own_ttft_s": 2.0, "mean_tpot_s": 2.0}
    assert agreement(one_by_one(), all_at_once()) == [3, 1]


def run(monkeypatch: pytest.MonkeyPatch, model: Path, *arguments: str) -> dict[str, object]:
    output = model / "result.json"
    common = ["--num-requests", "3", "--max-tokens", "6", "--rounds", "1", "--threads", "1", "--output", str(output)]
    monkeypatch.setattr(
        sys, "argv", ["benchmark.py", "--model", str(model), "--load-format", "dummy", *common, *arguments]
    )
    benchmark.main()
    found: dict[str, object] = json.loads(output.read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_both_sides_have_the_same_random_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    found = run(monkeypatch, shape_folder(tmp_path), "--dtype", dtype)
    agreeing = found["agreeing_tokens"]
    assert isinstance(agreeing, list)
    # the first token: later ones may part where activations are rounded otherwise
    assert agreeing == [6, 6, 6] if dtype == "float32" else min(agreeing) >= 1
    text = capsys.readouterr().out
    assert "A step reads all weights from memory" in text
    assert max(map(len, text.split("A step")[0].splitlines())) <= 80


@pytest.mark.slow
def test_a_warm_cache_holds_the_system_prompt_and_a_cold_one_only_what_the_round_itself_has_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(monkeypatch, shape_folder(tmp_path), "--prefix-demo", "--system-tokens", "300", "--temperature", "0.8")
    rounds = found["rounds"]
    assert isinstance(rounds, dict)
    assert list(rounds) == ["huggingface", "octavo_cold", "octavo_warm"]
    cold, warm = ([s["cached_tokens"] for s in rounds[name][0]["samples"]] for name in list(rounds)[1:])
    assert min(cold) == 0, "somebody computes the system prompt"
    assert min(warm) >= 300
    assert found["agreeing_tokens"] is None, "drawn tokens are not compared"
    assert "octavo warm" in capsys.readouterr().out


def test_int4_of_a_file_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--dtype", "int4"])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert "needs --load-format dummy" in capsys.readouterr().err
