"""Figures of runs, from samples that are given."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.load.compare import compare, differences, ratio_table
from octavo.cli.load.measures import Target, failures, interference, latencies, totals
from octavo.cli.load.plot import figure
from octavo.cli.load.record import KIND, Recorded, read_record
from octavo.cli.load.run_report import report
from octavo.cli.load.runner import ClientCost, Run
from octavo.cli.load.sample import Sample
from octavo.cli.tables import plain_lines
from octavo.core.errors import ConfigError


def sample(arrival_s: float = 0.0, *times: float, **changes: Any) -> Sample:
    """Answered; one token at each of these times."""
    fields: dict[str, Any] = {
        "index": 0,
        "group": "",
        "asked_prompt_tokens": 10,
        "asked_output_tokens": len(times),
        "arrival_s": arrival_s,
        "sent_s": arrival_s,
        "end_s": times[-1] if times else arrival_s,
        "event_times_s": list(times),
        "event_tokens": [None] * len(times),
        "prompt_tokens": 10,
        "completion_tokens": len(times),
        "status": 200,
        "finish_reason": "length",
    }
    return Sample(**(fields | changes))


GOOD = [sample(0.0, 1.0, 2.0, 3.0), sample(1.0, 1.5, 2.5), sample(2.0, 5.0, 5.5, 6.0, 6.5)]
FAILED = sample(0.0, 0.001, failure="short", message="1 token of 9 asked", asked_output_tokens=9)
REFUSED = sample(0.0, failure="status", status=429, message="queue full", end_s=0.002)


def test_a_failed_request_is_never_counted_as_a_fast_one() -> None:
    assert latencies([*GOOD, FAILED, REFUSED]) == latencies(GOOD)
    with_failures, without = (totals(found, 10.0, Target({})) for found in ([*GOOD, FAILED, REFUSED], GOOD))
    assert with_failures["output_tokens"] == without["output_tokens"] == 9
    assert (with_failures["requests"], with_failures["answered"]) == (5, 3)
    assert with_failures["output_tokens_per_s"] == 0.9
    assert with_failures["total_tokens_per_s"] == pytest.approx(3.9)
    assert with_failures["requests_per_s"] == pytest.approx(0.3)


def test_failures_are_counted_by_kind_status_and_message() -> None:
    found = failures([*GOOD, FAILED, REFUSED, REFUSED, sample(0.0, failure="interrupted")])
    assert found == [("status", 429, "queue full", 2), ("short", 200, "1 token of 9 asked", 1)]


def test_latencies_are_of_requests_and_itl_of_gaps() -> None:
    found = latencies(GOOD)
    assert found["ttft_s"] is not None
    assert (found["ttft_s"]["count"], found["ttft_s"]["p50"], found["ttft_s"]["max"]) == (3, 1.0, 3.0)
    assert found["itl_s"] is not None
    assert (found["itl_s"]["count"], found["itl_s"]["p50"]) == (6, 0.5)
    assert found["tpot_s"] is not None
    assert found["tpot_s"]["max"] == 1.0
    assert latencies([])["e2e_s"] is None


def test_goodput_counts_answers_within_every_limit() -> None:
    def met(*words: str) -> int:
        return totals([*GOOD, FAILED], 10.0, Target.parse(words))["goodput_requests"]

    assert met("ttft:1000") == 2
    assert met("ttft:1000", "tpot:999") == 0
    assert met("tpot:500") == 1
    assert met("e2e:3000", "ttft:999999") == 2
    assert totals(GOOD, 10.0, Target({}))["goodput_requests"] is None
    at_once = sample(0.0, 0.5, 0.5)
    assert Target.parse(["tpot:1"]).is_met_by(at_once)  # no TPOT to exceed


@pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:-1", "itl:5", "ttft:x", "ttft:nan", "e2e:0"])
def test_other_targets_are_refused_with_examples(word: str) -> None:
    with pytest.raises(ConfigError, match="write ttft:500, tpot:50 or e2e:9000"):
        Target.parse([word])


def test_waits_of_chats_are_apart_where_they_overlap_a_long_prompts_wait() -> None:
    chat = sample(0.0, 1.0, 2.0, 4.0, 5.0, 6.0, group="chat")
    long = sample(2.5, 4.5, group="long")  # disturbs from 2.5 to 4.5: the gaps 2-4 and 4-5
    found = interference([chat, long])
    assert found["itl_during_s"] is not None
    assert (found["itl_during_s"]["count"], found["itl_during_s"]["max"]) == (2, 2.0)
    assert found["itl_alone_s"] is not None
    assert (found["itl_alone_s"]["count"], found["itl_alone_s"]["max"]) == (2, 1.0)
    assert found["ttft_during_s"] is None
    met = interference([chat, dataclasses.replace(long, arrival_s=0.9, event_times_s=[], end_s=1.0, failure="timeout")])
    assert met["ttft_during_s"] is not None
    assert met["itl_during_s"] is None  # half-open: the gap from 1.0 on is not touched


@pytest.mark.parametrize("columns", [50, 60, 80, 200])
def test_a_report_fits_its_width_without_cutting_anything(columns: int) -> None:
    long = [dataclasses.replace(GOOD[0], group="long", arrival_s=-123456.0)]
    run = Run(samples=[*(dataclasses.replace(s, group="chat") for s in GOOD), *long, FAILED, REFUSED], duration_s=10.0)
    run.cost = ClientCost(cpu_s=0.5, lag_s=[0.001, 0.02])
    shown = report(run, Target.parse(["ttft:1000"]), ["a note " * 30], columns)
    assert max(map(len, shown.splitlines())) <= columns
    assert "…" not in shown
    joined = " ".join(shown.split())
    for wanted in ("chat TTFT", "amid a long one", "P50", "P99", "1 x status 429: queue full", "1 token of 9 asked"):
        assert wanted in joined
    assert ("samples" in shown) == (columns == 200)


def test_a_report_says_what_a_reader_must_know() -> None:
    merged = sample(0.0, 1.0, 2.0, completion_tokens=8)
    uncounted = sample(0.0, 1.0, 2.0, completion_tokens=None, prompt_tokens=None)
    run = Run(samples=[merged, uncounted], duration_s=2.0, was_interrupted=True)
    run.samples.append(sample(0.0, failure="interrupted"))
    shown = " ".join(report(run, Target({}), [], 80).split())
    assert "2.50 tokens per event" in shown
    assert "counted by events in 1 answers" in shown
    assert "1 requests in flight are not counted" in shown
    assert "2 of 2 answered" in shown
    nothing = " ".join(report(Run(samples=[REFUSED], duration_s=1.0), Target({}), [], 80).split())
    assert "no request was answered" in nothing
    assert "TTFT" not in nothing


def test_a_cache_that_has_met_the_seed_before_is_told() -> None:
    def shown(cached: int, *, shares_prompts: bool = False) -> str:
        run = Run(samples=[dataclasses.replace(one, cached_tokens=cached) for one in GOOD], duration_s=1.0)
        return " ".join(report(run, Target({}), [], 80, shares_prompts=shares_prompts).split())

    assert "has met this seed before" in shown(9)
    assert "has met this seed before" not in shown(2)
    assert "has met this seed before" not in shown(9, shares_prompts=True)


def recorded(samples: list[Sample], duration_s: float = 10.0, **plan: Any) -> Recorded:
    facts = {
        "plan": {"seed": 0, "workload": {"shared_prefix": 0}, **plan},
        "server": {"model": "m"},
        "host": {"cpu": "c"},
        "totals": totals(samples, duration_s, Target({})),
    }
    return Recorded(path=Path("x.json"), facts=facts, samples=samples, duration_s=duration_s)


def many(scale: float, jitter: int = 7) -> list[Sample]:
    """120 answers of 5 tokens, ``scale`` times as slow."""
    found = []
    for index in range(120):
        first = scale * (1 + (index * 37 % 100) / 100)
        times = [index + first + scale * step * (0.1 + (index * jitter + step) % 10 / 100) for step in range(5)]
        found.append(sample(float(index), *times))
    return found


def test_a_run_compared_with_itself_is_neither_better_nor_worse() -> None:
    found = compare(recorded(many(1.0), 130.0), recorded(many(1.0), 130.0))
    assert {ratio.ratio for ratio in found} == {1.0}
    assert {ratio.verdict for ratio in found} == {""}
    assert all(ratio.interval is not None and ratio.interval[0] <= 1 <= ratio.interval[1] for ratio in found)


def test_twice_as_slow_is_a_ratio_of_two_and_worse() -> None:
    found = {ratio.name: ratio for ratio in compare(recorded(many(1.0), 130.0), recorded(many(2.0), 260.0))}
    for name in ("TTFT mean", "TPOT P50", "ITL P99", "E2E mean"):
        assert found[name].ratio == pytest.approx(2.0)
        assert found[name].verdict == "worse"
        interval = found[name].interval
        assert interval is not None
        assert interval[0] < 2.0 < interval[1] or interval == pytest.approx((2.0, 2.0))
    assert found["output tokens/s"].ratio == pytest.approx(0.5)
    assert found["output tokens/s"].verdict == "worse"
    assert max(map(len, plain_lines(ratio_table(list(found.values()))))) <= 80


def test_the_p99_of_few_requests_has_no_interval() -> None:
    found = {ratio.name: ratio for ratio in compare(recorded(many(1.0)[:50]), recorded(many(1.0)[:50]))}
    assert found["TTFT P99"].interval is None
    assert found["TTFT P50"].interval is not None


def test_what_else_differs_is_told() -> None:
    told = differences(recorded(GOOD), recorded([*GOOD, FAILED], seed=1, workload={"shared_prefix": 9}))
    assert told == ["plan.seed: 0 / 1", "plan.workload.shared_prefix: 0 / 9", "B: 3 of 4 requests answered"]


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", json.dumps({"kind": KIND}), json.dumps({"kind": KIND, "requests": [{}]})]
)
def test_a_file_that_is_no_result_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ConfigError, match=r"a\.json is no"):
        read_record(tmp_path / "a.json")


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [REFUSED],
        GOOD,
        [sample(0.0, 1.0)],
        [sample(0.0, 1.0, 1.0)],
        [*(dataclasses.replace(s, group="chat") for s in GOOD), sample(2.0, 4.0, group="long")],
        many(1.0) * 20,
    ],
)
def test_a_plot_is_well_formed_whatever_there_is_to_draw(samples: list[Sample]) -> None:
    drawn = figure(samples, "a < b & c")
    root = ET.fromstring(drawn)
    assert root.tag.endswith("svg")
    assert "nan" not in drawn
    assert "inf" not in drawn.replace("info", "")
    shaded = [rect for rect in root.iter("{http://www.w3.org/2000/svg}rect") if rect.get("fill-opacity")]
    assert len(shaded) == sum(s.group == "long" for s in samples)
