"""What a run says: tables that fit their width, failures, the page, the plots; all from samples alone."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import page
import pytest
from cases import CaseResult, figures_of
from contenders import Contender, contenders_of, pairs_of
from in_process import Bench, BenchFailed, parse_batched_bench
from plot import ratio_plot
from results import NotAResult, Results, load
from tables import ratio_tables, report
from workloads import WORKLOADS, workloads_of

from octavo.cli.load.sample import Sample

PAIRS = pairs_of(["llama.cpp", "openvino", "vllm", "transformers"], ["Q4_1", "Q4_0", "bf16"])
HOST = {"cpu": "a CPU", "total_bytes": 24 << 30, "system": "Linux", "time": "2026-12-01T06:00:00+00:00"}
HOST |= {"revision": "5ee56e3c9a0d2b1a5ee56e3c9a0d2b1a5ee56e3c+changes", "load_1min": 0.1, "command": "python run.py"}
FACTS = {"model": "a model", "is_quick": False, "budget_minutes": 25, "threads": 2, "host": HOST}
START = {"contender": "vllm bf16", "ready_s": 115.0, "memory_bytes": 4_800_000_000, "argv": ["vllm"]}


def speed(contender: Contender) -> float:
    return 300.0 if contender.peer == "octavo" else 100.0


def made_up(rounds: int = 3, failed: int = 0) -> Results:
    """A run in which octavo is three times as fast in everything but its inter-token latency, which is half as good."""
    results = Results(
        facts={**FACTS, "peers": {"vllm": "0.32.0"}, "starts": [START]},
        pairs=PAIRS,
        tasks=[Bench(), *WORKLOADS],
    )
    for round_ in range(1, rounds + 1):
        for contender in contenders_of(PAIRS):
            fast = speed(contender) * (1 + 0.01 * round_)
            for task in results.tasks:
                in_ms = {"itl_p99_s": fast / 20_000, "ttft_mean_s": 1 / fast, "long_ttft_mean_s": 1 / fast}
                results.cases.append(
                    CaseResult(
                        round=round_,
                        contender=contender.name,
                        workload=task.name,
                        wall_s=1.0,
                        figures={figure.name: in_ms.get(figure.name, fast) for figure in task.figures},
                        bounds={"decode_1": (0.61, "memory")} if isinstance(task, Bench) else {},
                        asked=64,
                        failed=failed if contender.peer == "llama.cpp" else 0,
                        messages={"truncated: no [DONE]": failed} if failed and contender.peer == "llama.cpp" else {},
                        notes=("prompts are text",) if contender.peer == "transformers" else (),
                    )
                )
    return results


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_a_report_fits_its_width_and_is_plain(columns: int) -> None:
    text = report(made_up(failed=3), columns)
    assert max(map(len, text.splitlines())) <= columns
    assert text.isascii()
    assert "\x1b" not in text


def test_every_pair_has_a_column_and_every_figure_a_row_at_any_width() -> None:
    narrow, wide = report(made_up(), 80), report(made_up(), 400)
    for task in (Bench(), *WORKLOADS):
        for figure in task.figures:
            assert figure.label in narrow
            assert figure.label in wide
    for contender in contenders_of(PAIRS):
        assert contender.name in narrow


def test_ratios_are_above_one_where_octavo_is_faster_whatever_the_unit() -> None:
    results = made_up()
    same = next(iter(ratio_tables(results)))
    cells = {row[0]: row[1] for row in same.rows}
    assert cells["1 stream, 128/64"] == "3.00 (3.00-3.00)"
    assert cells["  P99 ITL"] == "0.33 (0.33-0.33)"
    assert cells["  mean TTFT"] == "3.00 (3.00-3.00)"


def test_one_round_has_no_interval() -> None:
    table = next(iter(ratio_tables(made_up(rounds=1))))
    assert table.rows[0][1] == "3.00"


def test_failed_requests_are_marked_counted_and_explained() -> None:
    text = report(made_up(rounds=2, failed=3), 120)
    assert "3.00 (3.00-3.00)!" in text
    assert "llama.cpp Q4_0, 32x128/64: 6 of 128" in text
    assert "x truncated: no [DONE]" in text


def test_a_peer_that_answered_nothing_is_said_to_have_failed() -> None:
    results = made_up(rounds=1)
    results.cases = [
        CaseResult(
            round=1, contender=c.contender, workload=c.workload, wall_s=1, asked=1, failed=1, messages={"died": 1}
        )
        if c.contender == "vllm bf16"
        else c
        for c in results.cases
    ]
    assert "failed!" in report(results, 80)
    assert "vllm bf16: 9 x died" in report(results, 80)


def test_a_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    results = made_up(rounds=2, failed=1)
    results.save(tmp_path / "run.json")
    again = load(tmp_path / "run.json")
    assert again == results
    assert report(again, 80) == report(results, 80)
    assert len((tmp_path / "run.json").read_text().splitlines()) > len(
        results.cases
    )  # a line for each: diffs can be read


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"kind": "something"}')
    with pytest.raises(NotAResult, match=r"other\.json is no result"):
        load(tmp_path / "other.json")
    with pytest.raises(NotAResult, match="cannot read"):
        load(tmp_path / "none.json")


def test_the_plots_are_pictures_with_a_mark_for_every_ratio() -> None:
    results = made_up()
    for group in ("same weights", "fastest formats"):
        root = ElementTree.fromstring(ratio_plot(results, group))
        pairs = [pair for pair in PAIRS if pair.group == group]
        ratios = sum(len(task.figures) for task in results.tasks) * len(pairs)
        assert len(root.findall("{http://www.w3.org/2000/svg}circle")) == ratios + len(pairs)  # and the legend's
        xs = [float(mark.attrib["cx"]) for mark in root.findall("{http://www.w3.org/2000/svg}circle")]
        assert 0 <= min(xs) <= max(xs) <= float(root.attrib["width"])


def test_the_page_says_where_octavo_loses_and_nothing_else() -> None:
    text = page.page([("peers-135m", made_up())])
    losses = text.partition("## Where octavo loses")[2]
    assert "16 streams, 1,024/128: P99 ITL: 0.33 (0.33-0.33), slower." in losses
    assert "1 stream" not in losses
    assert "octavo Q4_0 | decode, 1 stream | 61% | memory" in text
    assert "5ee56e3c9a0d with changes" in text
    assert "115.0 s | 4.80 GB" in text


def test_a_smoke_run_cannot_be_taken_for_a_measurement() -> None:
    results = made_up(rounds=1)
    results.facts["is_quick"] = True
    assert "nothing about speed" in page.page([("peers-135m-quick", results)])
    assert "not a measurement" in page.readme_part([("peers-135m-quick", results)])


def test_the_readme_is_changed_between_its_marks_only() -> None:
    begin, end = page.MARKS
    text = f"# Title\n{begin}\nold\n{end}\nrest\n"
    assert page.with_part(text, "new") == f"# Title\n{begin}\n\nnew\n\n{end}\nrest\n"
    assert page.with_part("no marks", "new") == "no marks"


def test_what_is_generated_is_what_the_stored_runs_say() -> None:
    for path, text in page.files(page.ROOT).items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python benchmarks/peers/page.py"


def test_rows_of_llama_batched_bench_are_found_among_its_log() -> None:
    row = '{"n_kv_max": 8704, "pp": 240, "tg": 32, "pl": 8, "t_pp": 4.1, "speed_pp": 468.2, "speed_tg": 232.7}'
    rows = parse_batched_bench(f"build: 1\n0.00.1 I {row}\n\nllama_perf_context_print: load time\n{row}\n")
    assert [(found["pl"], found["speed_tg"], found["speed_pp"]) for found in rows] == [(8, 232.7, 468.2)] * 2


@pytest.mark.parametrize("text", ["", "error: unable to load model\n", '{"speed_tg": 1.0, "pl":'])
def test_a_bench_without_rows_has_failed(text: str) -> None:
    with pytest.raises(BenchFailed, match="llama-batched-bench"):
        parse_batched_bench(text)


def sample(group: str, arrival_s: float, times_s: list[float], failure: str = "") -> Sample:
    made = Sample(
        index=0,
        group=group,
        asked_prompt_tokens=100,
        asked_output_tokens=len(times_s),
        arrival_s=arrival_s,
        event_times_s=times_s,
        event_tokens=[1] * len(times_s),
        completion_tokens=len(times_s),
        prompt_tokens=100,
        end_s=times_s[-1],
    )
    if failure:
        made.fail("truncated")
    return made


def test_long_prompts_count_apart_and_failures_not_at_all() -> None:
    samples = [sample("chat", 0.0, [0.5, 1.0]), sample("chat", 1.0, [1.5, 3.5]), sample("long", 1.0, [3.0])]
    found = figures_of([*samples, sample("chat", 0.0, [0.1, 0.2, 0.3], failure="truncated")], 4.0)
    assert found["output_tokens_per_s"] == 1.0
    assert found["prompt_tokens_per_s"] == 200.0
    assert (found["itl_p50_s"], found["itl_p99_s"]) == (0.5, 2.0)
    assert found["long_ttft_mean_s"] == 2.0
    assert figures_of([sample("chat", 0.0, [0.1], failure="truncated")], 4.0) == {}


def test_workloads_are_chosen_by_words_of_their_names() -> None:
    assert [w.name for w in workloads_of("shared,prefill", quick=False)] == ["prefill 2048", "32 chats, 1000 shared"]
    assert len(workloads_of("all", quick=True)) == len(WORKLOADS)
    with pytest.raises(ValueError, match="'pizza' is in no workload's name"):
        workloads_of("pizza", quick=False)
