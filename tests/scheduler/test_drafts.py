"""Drafted tokens change nothing but the number of steps: which are right is for the draws to say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from model_free import SIZE, Driver, compute_alone, request
from test_rules_have_teeth import Fault, plant
from test_schedule_invariance import NUM_SCHEDULES, run_schedules

from octavo.core.plan import ScheduledChunk
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence as Known


class Planted:
    """Proposes what it was given, once."""

    def __init__(self, *token_ids: int) -> None:
        self.token_ids = token_ids

    def propose(self, seq: Known, most: int) -> Iterable[int]:
        proposed, self.token_ids = self.token_ids, ()
        return proposed


def decoding(new: Request, **more: Any) -> Driver:
    """A driver in which the request has drawn its first token."""
    driver = Driver(**more)
    driver.add(new)
    driver.step()
    return driver


def test_tokens_do_not_depend_on_drafts() -> None:
    total = run_schedules(range(NUM_SCHEDULES), drafts=True)
    for name in ("preempted", "forked", "drafted", "accepted", "across_blocks", "ended_early"):
        assert total[name] >= NUM_SCHEDULES // 5, f"{name} happened only {total[name]} times"


def test_nor_in_a_model_whose_layers_keep_different_things() -> None:
    total = run_schedules(range(NUM_SCHEDULES), mixed=True, drafts=True)
    for name in ("preempted", "drafted", "accepted", "window given back", "no snapshot"):
        assert total[name] >= NUM_SCHEDULES // 5, f"{name} happened only {total[name]} times"
    assert total["failed_late"] > 0
    assert total["accepted"] < 0.9 * total["drafted"]


@pytest.mark.slow
def test_tokens_do_not_depend_on_drafts_in_three_thousand_more_schedules() -> None:
    run_schedules(range(NUM_SCHEDULES, NUM_SCHEDULES + 3_000), drafts=True)


FAULTS = {
    "takes a draw behind a wrong guess": Fault(
        "",
        Scheduler._advance_drafted,
        "if event.finish_reason is not None or token.token_id != guess:",
        "if event.finish_reason is not None or guess is None:",
    ),
    "takes one draw too few": Fault(
        "",
        Scheduler._advance_drafted,
        "for token, guess in zip(tokens, [*drafted, None], strict=False):",
        "for token, guess in zip(tokens, [*drafted[1:], None], strict=False):",
    ),
    "goes on after a stop": Fault(
        "",
        Scheduler._advance_drafted,
        "if event.finish_reason is not None or token.token_id != guess:",
        "if token.token_id != guess:",
    ),
    "counts what was only guessed as computed": Fault(
        "",
        Scheduler._advance_drafted,
        "drafted, events = seq.take_back(), list[TokenEvent]()",
        "drafted, events = seq.take_back(), list[TokenEvent]()\n    seq.num_computed += len(drafted) - 1",
    ),
    "keeps a guess": Fault("", Known.take_back, "del self.tokens[known:]", "del self.tokens[known + 1 :]"),
    "draws from one position too far": Fault(
        "",
        Known.chunk,
        "draw_positions=range(start, end)",
        "draw_positions=range(min(start + 1, end - 1), end)",
    ),
    "bans stop tokens as for the first draw": Fault(
        "",
        Known.__init__,
        "later = (self.prompt_len + self.min_tokens, rule)",
        "later = (self.prompt_len + self.min_tokens + 1, rule)",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(FAULTS[name], monkeypatch)
    with pytest.raises(AssertionError):
        run_schedules(range(NUM_SCHEDULES), drafts=True)


def test_right_guesses_are_taken_in_one_step() -> None:
    asked = request("a", 6, 9)
    driver, truth = decoding(asked), compute_alone(asked).tokens
    driver.scheduler.drafter = Planted(*truth[1:4])
    plan = driver.step()
    (chunk,) = plan.chunks
    assert (chunk.start, list(chunk.token_ids), chunk.reason) == (6, truth[:4], "verify")
    assert chunk.drawing == range(6, 10)
    assert driver.tokens("a") == truth[:5]
    (seq,) = driver.scheduler.sequences()
    assert (seq.num_computed, seq.num_tokens) == (10, 11)
    driver.run()
    assert driver.tokens("a") == truth


def test_what_stands_behind_a_wrong_guess_is_neither_taken_nor_computed_nor_committed() -> None:
    asked = request("a", 6, 12)
    driver, truth = decoding(asked), compute_alone(asked).tokens
    driver.scheduler.drafter = Planted(truth[1], truth[2] + 1, *truth[3:5])
    driver.step()
    assert driver.tokens("a") == truth[:3]
    (seq,) = driver.scheduler.sequences()
    assert seq.num_computed == 8
    assert driver.scheduler.manager.stats().nodes == 8 // SIZE
    driver.run()
    assert driver.tokens("a") == truth


@pytest.mark.parametrize(("room", "most"), [({"num_blocks": 3}, 4), ({"max_num_batched_tokens": 6}, 4), ({}, 4)])
def test_drafts_take_what_is_left(room: dict[str, int], most: int) -> None:
    asked = request("a", 6, 6)
    driver, truth = decoding(asked, **room), compute_alone(asked).tokens
    driver.scheduler.drafter = Planted(*truth[1:], *range(100))
    (chunk,) = driver.step().chunks
    assert len(chunk.token_ids) == 1 + min(most, SIZE, 4)  # the last of max_tokens needs no guess
    assert driver.tokens("a") == truth[: len(chunk.token_ids) + 1]


def test_nobody_is_preempted_for_a_guess() -> None:
    driver = Driver(num_blocks=5)
    first = request("a", 8, 8)
    driver.add(first, request("b", 5, 8))
    driver.step()
    driver.scheduler.drafter = Planted(*compute_alone(first).tokens[1:6])
    plan = driver.step()
    assert (plan.preempted, plan.free_blocks) == ((), 0)
    assert driver.lengths(plan) == {"a": 4, "b": 1}, "up to the end of the last block"


@pytest.mark.parametrize("by", ["stop", "length"])
def test_a_run_of_right_guesses_ends_where_the_answer_does(by: str) -> None:
    whole = compute_alone(request("a", 6, 12)).tokens
    at = next(i for i in range(2, 6) if whole[i] not in whole[:i]) if by == "stop" else 11
    stops = {"stop": (whole[at],), "length": ()}[by]
    asked = request("a", 6, 12, sampling=SamplingParams(stop_token_ids=stops))
    driver = decoding(asked)
    while driver.scheduler.sequences()[0].num_output < at - 1:
        driver.step()
    driver.scheduler.drafter = Planted(*whole[at - 1 :], 1, 2, 3)
    before = len(driver.plans)
    driver.run()
    assert driver.tokens("a") == whole[: at + 1]
    assert driver.end("a").finish_reason == by
    assert len(driver.plans) - before == 1
    assert driver.scheduler.manager.stats().nodes == (6 + at) // SIZE, "positions of tokens that count, no more"


class Failing:
    """Fails the draw after so many of a chunk."""

    def __init__(self, driver: Driver, after: int) -> None:
        self.execute, self.after = driver.runner.execute, after

    def __call__(self, plan: Any) -> Any:
        result = self.execute(plan)
        result.tokens = tuple(tokens[: self.after] for tokens in result.tokens)
        result.failed = dict.fromkeys(range(len(plan.chunks)), "no_token_left")
        return result


@pytest.mark.parametrize(("wrong", "fails"), [(4, True), (2, True), (1, False), (0, False)])
def test_a_failed_draw_counts_if_all_guesses_before_it_were_right(wrong: int, fails: bool) -> None:
    asked = request("a", 6, 12)
    driver, truth = decoding(asked), compute_alone(asked).tokens
    guesses = truth[1:5]
    guesses[wrong:] = [token + 1 for token in guesses[wrong:]]
    driver.scheduler.drafter = Planted(*guesses)
    plan = driver.scheduler.plan(driver.now)
    events = driver.scheduler.apply(plan, Failing(driver, 2)(plan))
    drawn = [event.token.token_id for event in events if event.token is not None]
    assert drawn == truth[1 : 2 + min(wrong, 1)]
    assert (events[-1].finish_reason == "error") is fails
    driver.scheduler.manager.check_integrity()


def test_a_step_that_fails_and_books_that_begin_again_keep_no_guess() -> None:
    asked, other = request("a", 6, 12), request("b", 5, 6)
    driver = decoding(asked)
    driver.add(other)
    truth = compute_alone(asked).tokens
    driver.scheduler.drafter = Planted(*truth[1:4])
    plan = driver.scheduler.plan(driver.now)
    assert any(chunk.reason == "verify" for chunk in plan.chunks)
    driver.scheduler.restart(())
    assert driver.scheduler.sequences()[0].tokens == [*asked.prompt_token_ids, truth[0]]
    driver.runner.poison_free_blocks()
    driver.run()
    assert driver.tokens("a") == truth
    assert driver.tokens("b") == compute_alone(other).tokens


def test_a_chunk_may_draw_at_any_of_its_positions() -> None:
    def drawing(**fields: Any) -> Sequence[int]:
        rule = Known(request("a", 4)).draw_rule
        return ScheduledChunk(
            request_id="a", start=4, token_ids=(1, 2, 3), block_tables=(), draw=rule, **fields
        ).drawing

    assert list(drawing()) == [6]
    assert list(drawing(draw_positions=range(4, 6))) == [4, 5]
    assert list(ScheduledChunk(request_id="a", start=4, token_ids=(1,), block_tables=()).drawing) == []
