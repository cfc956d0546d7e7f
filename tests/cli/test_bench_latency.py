"""``octavo bench latency``: the load it makes and the figures it draws from it, on an engine without a model."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from octavo.cli.bench_latency import RequestSample, Workload, latencies, run_workload
from octavo.cli.distributions import Lengths, distribution
from octavo.core.errors import ConfigError, RequestFailed

Answer = Callable[[Sequence[int]], Sequence[int]]


def workload(**changes: Any) -> Workload:
    fields: dict[str, Any] = {
        "num_requests": 20,
        "request_rate": None,
        "concurrency": 3,
        "prompt_tokens": Lengths(2, 9),
        "output_tokens": Lengths(1, 6),
    }
    return Workload(**(fields | changes))


def endless(prompt: Sequence[int]) -> Sequence[int]:
    return range(1000)


def test_a_workload_is_a_pure_function_of_its_fields() -> None:
    assert workload().requests(100) == workload().requests(100)
    assert workload(seed=1).requests(100) != workload().requests(100)
    planned = workload(num_requests=500).requests(100)
    assert {len(request.prompt) for request in planned} == set(range(2, 10))
    assert {request.output_tokens for request in planned} == set(range(1, 7))
    assert all(0 <= token < 100 for request in planned for token in request.prompt)


def test_arrivals_have_the_wished_rate_and_exponential_gaps() -> None:
    due = [request.due_s for request in workload(num_requests=4000, request_rate=50.0).requests(10)]
    gaps = [later - earlier for earlier, later in zip([0.0, *due], due, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.1)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation == pytest.approx(mean, rel=0.1)  # of an exponential distribution


def test_clients_ask_again_only_when_they_have_their_answer(fake_engine: Any) -> None:
    engine = fake_engine(endless)
    in_flight = []
    step = engine.step

    def watched() -> Any:
        in_flight.append(len(engine.running))
        return step()

    engine.step = watched
    samples = run_workload(engine, workload())
    planned = workload().requests(engine.config.vocab_size)
    assert [list(request.prompt_token_ids) for request in engine.seen] == [request.prompt for request in planned]
    assert [len(sample.token_times_s) for sample in samples] == [request.output_tokens for request in planned]
    assert max(in_flight) == 3
    assert in_flight[0] == 3


def test_requests_that_arrive_at_a_rate_are_timed_from_when_they_were_due(fake_engine: Any) -> None:
    engine = fake_engine(endless)
    wish = workload(num_requests=30, request_rate=3000.0)
    samples = run_workload(engine, wish)
    assert [sample.start_s for sample in samples] == [one.due_s for one in wish.requests(engine.config.vocab_size)]
    assert all(sample.ttft_s > 0 for sample in samples)


def test_a_request_that_cannot_fit_or_ends_early_is_an_error(fake_engine: Any) -> None:
    with pytest.raises(ConfigError, match="may have 1005 tokens"):
        run_workload(fake_engine(endless), workload(prompt_tokens=Lengths(1, 999)))
    engine = fake_engine(endless)
    step = engine.step

    def failing() -> Any:
        return [*step(), *(engine.abort(name)[0] for name in list(engine.running))]

    engine.step = failing
    with pytest.raises(RequestFailed, match="'abort'"):
        run_workload(engine, workload(output_tokens=Lengths(5, 5)))


def test_latencies_follow_from_token_times() -> None:
    sample = RequestSample(prompt_tokens=5, start_s=1.0, token_times_s=[1.5, 1.6, 1.6, 1.9])
    assert sample.ttft_s == pytest.approx(0.5)
    assert sample.tpot_s == pytest.approx(0.4 / 3)
    assert sample.gaps_s == pytest.approx([0.1, 0.3])
    single = RequestSample(prompt_tokens=5, start_s=0.0, token_times_s=[0.25])
    assert (single.tpot_s, single.gaps_s) == (None, [])
    figures = latencies([sample, single])
    assert [figures[name]["count"] for name in ("ttft_s", "tpot_s", "itl_s")] == [2, 1, 2]  # type: ignore[index]
    assert latencies([single])["itl_s"] is None


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(value) for value in range(1, 201)]
    random.Random(0).shuffle(values)
    found = distribution(values)
    assert found is not None
    assert [found[key] for key in ("p50", "p90", "p95", "p99", "max")] == [100, 180, 190, 198, 200]
    assert (found["mean"], found["min"], found["count"]) == (100.5, 1, 200)
    assert distribution([7.0]) == dict.fromkeys(("mean", "min", "p50", "p90", "p95", "p99", "max"), 7.0) | {"count": 1}
    assert distribution([]) is None


@pytest.mark.parametrize(("text", "low", "high"), [("128", 128, 128), ("32:512", 32, 512), (" 1:1 ", 1, 1)])
def test_lengths_are_a_number_or_a_range(text: str, low: int, high: int) -> None:
    assert Lengths.parse(text) == Lengths(low, high)


@pytest.mark.parametrize("text", ["", "0", "5:3", "a", "1:2:3", "-4", "1.5"])
def test_other_lengths_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="32:512 for a range"):
        Lengths.parse(text)
