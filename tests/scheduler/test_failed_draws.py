"""A draw that fails ends its request alone; only numbers that are not finite take blocks out of the cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
from model_free import Driver, request

from octavo.core.plan import DrawFailure
from octavo.core.sampling_params import SamplingParams


@pytest.mark.parametrize(("failure", "cached"), [("no_token_left", 16), ("not_finite", 0)])
def test_only_a_row_that_is_not_finite_takes_its_blocks_out_of_the_cache(failure: DrawFailure, cached: int) -> None:
    driver = Driver()
    prompt = list(range(18))
    driver.add(request("a", prompt, 4), request("beside", 5, 4))
    driver.step()
    plan = driver.scheduler.plan(driver.now)
    (at,) = [i for i, chunk in enumerate(plan.chunks) if chunk.request_id == "a"]
    result = replace(driver.runner.execute(plan, failed=[at]), failed={at: failure})
    driver.events += driver.scheduler.apply(plan, result)
    end = driver.end("a")
    assert (end.finish_reason, end.failure) == ("error", failure)
    driver.run()
    assert driver.end("beside").finish_reason == "length"
    driver.add(request("again", prompt, 1))
    (admission,) = driver.step().admitted
    assert admission.cached_tokens == cached


def test_the_error_names_the_masks_that_the_request_has() -> None:
    sampling = SamplingParams(allowed_token_ids=(1,), bad_words_token_ids=((1, 1),), stop_token_ids=(6,))
    driver = Driver()
    driver.add(request("a", 3, 4, sampling=sampling))
    driver.step()
    plan = driver.scheduler.plan(driver.now)
    result = replace(driver.runner.execute(plan, failed=[0]), failed={0: "no_token_left"})
    driver.events += driver.scheduler.apply(plan, result)
    why = "allowed_token_ids and bad_words left no token to draw after 1 tokens; allow more tokens or forbid fewer"
    assert driver.end("a").stop_reason == why
    assert SamplingParams(min_tokens=2).masks == ("min_tokens",)
