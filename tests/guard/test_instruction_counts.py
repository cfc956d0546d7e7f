"""The guard against growth in instructions: what passes, what fails, what it says; it sees planted slowdowns."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "benchmarks" / "guard"))

import instruction_counts as guard  # noqa: E402

needs_valgrind = pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
KEY = "python: CPython 3.11.7"


def problems(stored: int, now: int) -> list[str]:
    return [v.problem for v in guard.compare({KEY: {"a path": stored}}, {KEY: {"a path": now}})]


def test_five_percent_fail_and_less_passes() -> None:
    assert problems(1_000_000, 1_050_000) == ["grew by 5.0%"]
    assert problems(1_000_000, 1_049_999) == [""]
    assert problems(1_000_000, 1_000_000) == [""]
    assert problems(1_000_000, 400_000) == [""]


def test_another_interpreter_is_not_compared_and_that_is_said() -> None:
    verdicts = guard.compare({KEY: {"a path": 1}}, {"python: CPython 3.11.8": {"a path": 99}})
    assert [v.problem for v in verdicts] == [""]
    assert "not compared: no figures for python: CPython 3.11.8; make guard-update adds them" in guard.report(verdicts)
    assert "none grew" not in guard.report(verdicts)


def test_a_path_that_came_or_went_needs_an_update() -> None:
    verdicts = guard.compare({KEY: {"old": 1, "kept": 1}}, {KEY: {"kept": 1, "new": 1}})
    assert {v.path: v.problem for v in verdicts} == {
        "old": "is not measured any more",
        "kept": "",
        "new": "has no figure",
    }


def test_a_failure_names_the_path_both_figures_the_change_and_the_way_out() -> None:
    report = guard.report(guard.compare({KEY: {"slow": 1_000_000, "fine": 10}}, {KEY: {"slow": 1_250_000, "fine": 10}}))
    [line] = [line for line in report.splitlines() if line.startswith("slow")]
    assert line.split() == ["slow", "1,000,000", "1,250,000", "+25.0%", "<--", "grew", "by", "25.0%"]
    assert "1 of 2 paths fail" in report
    assert "make guard-update" in report


def test_a_fall_is_worth_an_update_too() -> None:
    assert "may grow back unseen" in guard.report(guard.compare({KEY: {"a": 100}}, {KEY: {"a": 90}}))
    assert "may grow back unseen" not in guard.report(guard.compare({KEY: {"a": 100}}, {KEY: {"a": 99}}))


def test_an_update_keeps_the_figures_of_other_builds(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    guard.write_figures({"b": {"path": 1}, "c": {"path": 2}}, file)
    guard.write_figures({"a": {"path": 3}, "c": {"path": 4}}, file)
    assert json.loads(file.read_text()) == {"a": {"path": 3}, "b": {"path": 1}, "c": {"path": 4}}
    assert guard.read_figures(tmp_path / "none.json") == {}


def test_keys_name_interpreter_and_compiler() -> None:
    keys = guard.build_keys()
    assert sys.version.split()[0] in keys["python"]
    assert keys["python"].removeprefix("python: ") in keys["numpy"]
    assert "GCC" in keys["native"] or "clang" in keys["native"]


def test_without_valgrind_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(guard.GuardError, match="apt-get install valgrind"):
        guard.measure()


#: Path -> whether planted.py has slowed it.
SLOWED = {
    "prefix tree: find, diverging inside block 32": True,
    "detokenizer: 64 words": True,
    "batch: 64 decodes": False,
    "product: Q4_1, 1 row": True,
}


@pytest.fixture(scope="module")
def before() -> guard.Figures:
    return guard.measure(list(SLOWED))


@needs_valgrind
@pytest.mark.slow
def test_it_sees_a_planted_loop_a_lost_fast_path_and_a_lost_kernel_and_nothing_else(before: guard.Figures) -> None:
    verdicts = guard.compare(before, guard.measure(list(SLOWED), script=HERE / "planted.py"))
    assert {v.path: bool(v.problem) for v in verdicts} == SLOWED


@needs_valgrind
@pytest.mark.slow
def test_a_second_run_counts_the_same(before: guard.Figures) -> None:
    again = guard.measure(list(SLOWED))
    for group, counts in before.items():
        for path, count in counts.items():
            assert again[group][path] == pytest.approx(count, rel=0.005), path


@needs_valgrind
@pytest.mark.slow
def test_a_worker_that_fails_fails_the_guard() -> None:
    with pytest.raises(guard.GuardError, match="no such path"):
        guard.measure(["no such path"])
