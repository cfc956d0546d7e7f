"""The engine without its thread: what each call leaves behind once it has returned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from test_async_engine import Runner, asked, load, params
from test_engine_survives import RaisesAt, leak_nothing, told, wanted
from test_engine_survives import processor as the_processor
from test_engine_survives import scheduler as the_scheduler

from octavo.core.config import EngineConfig
from octavo.core.errors import InvalidRequest
from octavo.core.output import RequestOutput
from octavo.core.request import Request
from octavo.engine.engine import CHECK_INTERVAL_S, Engine
from octavo.engine.requests import make_requests

NUM_TOKENS = 6


def started(**wish: Any) -> Engine:
    return load(Runner())(EngineConfig(block_size=4, **wish))


def sequences(engine: Engine, prompt: list[int], name: str, n: int = 1, **sampling: Any) -> list[Request]:
    submission = asked(prompt, params(sampling.pop("max_tokens", NUM_TOKENS), **sampling), request_id=name, n=n)
    return make_requests(engine.config, submission, arrival_s=engine.clock())


def run(engine: Engine) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while engine.has_unfinished:
        outputs += engine.step()
    return outputs


@pytest.mark.parametrize("afterwards", [False, True], ids=["instead", "afterwards"])
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [(the_scheduler, "add", 1), (the_scheduler, "add", 3), (the_processor, "add", 3)],
)
def test_a_call_that_cannot_be_queued_leaves_nothing_queued(
    owner: Callable[[Engine], Any], name: str, call: int, afterwards: bool
) -> None:
    engine = started()
    RaisesAt(owner(engine), name, call, MemoryError, afterwards=afterwards)
    with pytest.raises(MemoryError, match="planted"):
        engine.submit(sequences(engine, [1, 2], "r", n=4))
    leak_nothing(engine)


def test_a_request_that_the_scheduler_refuses_costs_nobody_their_blocks() -> None:
    engine = started()
    engine.submit(sequences(engine, [1] * 9, "running"))
    outputs = engine.step()
    (request,) = sequences(engine, [1], "refused")
    with pytest.raises(InvalidRequest, match="max_model_len"):
        engine.submit([replace(request, max_tokens=10_000)])
    assert engine.scheduler.num_running == 1, "it would wait again after a restart"
    assert told(outputs + run(engine)) == wanted(9)
    leak_nothing(engine)


def test_two_errors_of_the_scheduler_with_a_step_between_them_end_nobody() -> None:
    engine = started()
    for n in (2, 3):
        engine.submit(sequences(engine, [n] * n, f"r{n}"))
    outputs = engine.step()
    for _ in range(2):
        planted = RaisesAt(engine.scheduler, "plan", 1, MemoryError, afterwards=False)
        for _ in range(2):
            outputs += engine.step()
        assert planted.raised
    outputs += run(engine)
    for n in (2, 3):
        assert told([output for output in outputs if output.request_id == f"r{n}"]) == wanted(n)
    leak_nothing(engine)


def test_who_is_forgotten_with_all_others_leaves_nothing() -> None:
    engine = started(max_num_seqs=1)
    for n in (1, 2):
        engine.submit(sequences(engine, [n], f"r{n}"))
    engine.step()
    engine.end_all()
    leak_nothing(engine)


def test_the_last_output_tells_what_was_cached_and_how_long_it_took() -> None:
    engine, last = started(), []
    for name in ("first", "second"):
        engine.submit(sequences(engine, list(range(9)), name))
        last.append(run(engine)[-1])
    first, second = last
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens, first.usage.cached_tokens) == (9, NUM_TOKENS, 0)
    assert second.usage == replace(first.usage, cached_tokens=8)
    assert first.timings is not None
    assert first.timings.total_s >= (first.timings.ttft_s or 0.0) > 0.0


def test_an_abort_returns_the_last_output_once() -> None:
    engine = started()
    engine.submit(sequences(engine, list(range(9)), "r", max_tokens=40))
    text = told(engine.step() + engine.step())
    (output,) = engine.abort("r")
    leak_nothing(engine)
    assert (output.request_id, output.finish_reason, output.text) == ("r", "abort", "")
    assert output.usage is not None
    assert output.usage.completion_tokens == len(text) == 2
    assert output.timings is not None
    assert engine.abort("r") == engine.abort("unknown") == []


def test_a_stop_string_ends_its_sequence_within_the_step_that_completes_it() -> None:
    engine = started()
    engine.submit(sequences(engine, [1], "r", max_tokens=40, stop=("bcd",)))
    outputs: list[RequestOutput] = []
    while not (outputs and outputs[-1].finish_reason):
        outputs += engine.step()
    leak_nothing(engine)
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", "bcd")


def test_the_books_are_looked_at_once_a_minute_at_most() -> None:
    engine, looked = started(), list[float]()
    now = engine.clock()
    engine.scheduler.manager.check_integrity = lambda: looked.append(now)  # type: ignore[method-assign]
    engine.clock = lambda: now
    start = now
    for passed in (0.0, 0.99, 1.5, 2.0, 2.6, 3.0):
        now = start + passed * CHECK_INTERVAL_S
        engine.idle()
    assert looked == [start + passed * CHECK_INTERVAL_S for passed in (1.5, 2.6)]
