"""The promise that scheduling cannot change tokens, with the real model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from offline import Offline, Result

from octavo.core.sampling_params import SamplingParams

pytestmark = pytest.mark.slow
Engines = Callable[..., Offline]

#: KV bytes of so many blocks on either backend are a fraction of what eight sequences need.
SMALL_POOL_BLOCKS = 28
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The three primary colours are",
    "A recipe for bread needs",
    "In the year 1969",
    "Dear Sir or Madam,",
]


def same(backend: str, expected: Result, actual: Result) -> None:
    """Native: equal to the last bit. Torch: equal up to the first near-tie, logprobs within 1e-4 until there."""
    if backend == "native":
        assert actual.token_ids == expected.token_ids
        assert actual.logprobs == expected.logprobs
        assert actual.text == expected.text
        return
    for one, other in zip(expected.logprobs, actual.logprobs, strict=False):
        assert one.logprob is not None
        assert other.logprob is not None
        if one.token_id != other.token_id:
            margin = one.top[0][1] - one.top[1][1]
            assert margin < 1e-3, f"another token was drawn at a margin of {margin}"
            return
        assert abs(one.logprob - other.logprob) < 1e-4
    assert actual.text == expected.text


def prompts_of(engine: Offline) -> list[list[int]]:
    return [engine.loaded.tokenizer.encode(text) for text in PROMPTS]


GREEDY = SamplingParams(temperature=0.0, max_tokens=16, logprobs=2)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=16, logprobs=2, repetition_penalty=1.1)


@pytest.fixture(scope="module")
def alone(backend: str, engine_of: Engines) -> dict[SamplingParams, list[Result]]:
    """Each prompt run by itself."""
    engine = engine_of(backend=backend)
    return {params: engine.generate(prompts_of(engine), params, together=False) for params in (GREEDY, SEEDED)}


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"chunking": "fixed", "chunk_size": 3},
        {"step_mode": "split", "chunking": "fixed", "chunk_size": 5},
        {"block_size": 5},
        {"threads": 1},
    ],
    ids=["together", "chunks of 3", "split", "blocks of 5", "one thread"],
)
def test_tokens_do_not_depend_on_batch_mates_chunks_blocks_or_threads(
    backend: str,
    engine_of: Engines,
    alone: dict[SamplingParams, list[Result]],
    shape: dict[str, object],
    params: SamplingParams,
) -> None:
    engine = engine_of(backend=backend, **shape)
    for expected, actual in zip(alone[params], engine.generate(prompts_of(engine), params), strict=True):
        same(backend, expected, actual)


def small_pool(backend: str, engine_of: Engines) -> Offline:
    """An engine whose KV pool has SMALL_POOL_BLOCKS blocks of 4 tokens."""
    config = engine_of(backend=backend).loaded.config
    per_token = config.kv_cache_bytes // (config.num_blocks * config.block_size)
    return engine_of(backend=backend, block_size=4, max_model_len=96, kv_cache_memory=SMALL_POOL_BLOCKS * 4 * per_token)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_requests_that_do_not_fit_are_preempted_finish_and_say_the_same(
    backend: str, engine_of: Engines, alone: dict[SamplingParams, list[Result]], params: SamplingParams
) -> None:
    engine = small_pool(backend, engine_of)
    before = engine.loaded.tracer.metrics.preemptions
    results = engine.generate(prompts_of(engine), params)
    assert engine.loaded.tracer.metrics.preemptions > before, "the pool was meant to be too small"
    for expected, actual in zip(alone[params], results, strict=True):
        same(backend, expected, actual)
        assert actual.last.finish_reason in ("length", "stop")


def test_a_prefix_hit_inside_a_block_changes_nothing(backend: str, engine_of: Engines) -> None:
    engine = engine_of(backend=backend)
    rng = random.Random(1)
    head = [rng.randrange(100, 20_000) for _ in range(100)]
    prompts = [[*head[:71], 5, 6, 7], [*head[:83], 9], head]
    expected = engine.generate(prompts, GREEDY, together=False, salt=None)
    cold = [engine.generate([prompt], GREEDY)[0] for prompt in prompts]
    cached = [result.last.usage.cached_tokens for result in expected if result.last.usage]
    assert cached == [0, 71, 83], "to the token, not to the block"
    for one, other in zip(cold, expected, strict=True):
        same(backend, one, other)


def test_a_shared_prefix_of_512_tokens_is_computed_once(backend: str, engine_of: Engines) -> None:
    engine = engine_of(backend=backend)
    rng = random.Random(2)
    head = [rng.randrange(100, 20_000) for _ in range(512)]
    params = SamplingParams(temperature=0.0, max_tokens=2)
    first, second = engine.generate([[*head, 11], [*head, 12, 13]], params, together=False)
    assert first.last.usage is not None
    assert second.last.usage is not None
    assert (first.last.usage.cached_tokens, second.last.usage.cached_tokens) == (0, 512)

    before = engine.last_step
    results = engine.generate([[*head, 100 + i] for i in range(16)], params)
    prefilled = sum(length for _, start, length in engine.steps_since(before) if start < 513)
    assert prefilled == 513 + 15 * 1, "16 that arrive together compute the head once"
    assert sorted(r.last.usage.cached_tokens for r in results if r.last.usage) == [0] + [512] * 15


def test_forks_differ_from_each_other_and_repeat_from_the_seed(backend: str, engine_of: Engines) -> None:
    engine = engine_of(backend=backend)
    prompt = engine.loaded.tokenizer.encode("Name an animal:")
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=24, logprobs=0)
    once, again = (engine.generate([prompt], params, n=4) for _ in range(2))
    assert len({result.text for result in once}) == 4
    for one, other in zip(once, again, strict=True):
        same(backend, one, other)
    assert all(r.last.usage and r.last.usage.prompt_tokens == len(prompt) for r in once)


def test_an_aborted_request_gives_its_blocks_back_and_disturbs_nobody(
    backend: str, engine_of: Engines, alone: dict[SamplingParams, list[Result]]
) -> None:
    engine = engine_of(backend=backend)
    salt = engine.new_salt()
    kept = [engine.submit(prompt, GREEDY, salt=salt)[0] for prompt in prompts_of(engine)[:3]]
    gone = engine.submit(prompts_of(engine)[3], GREEDY, salt=salt)[0]
    for _ in range(5):
        engine.step()
    pinned = engine.loaded.scheduler.manager.stats().pinned_blocks
    outputs = engine.loaded.abort(gone.request_id)
    assert [output.finish_reason for output in outputs] == ["abort"]
    assert engine.loaded.scheduler.manager.stats().pinned_blocks < pinned
    engine.run()
    for request, expected in zip(kept, alone[GREEDY], strict=False):
        same(backend, expected, engine.results.pop(request.request_id))


def test_greedy_text_is_the_references_wherever_it_was_sure(
    engine_of: Engines, reference: list[dict[str, Any]]
) -> None:
    """On the backend that serves by default. Native quantises activations, so only clear margins count for it."""
    engine = engine_of()
    clear = 1.0 if engine.loaded.config.backend == "native" else 0.02
    for case in reference:
        wanted = [int(token) for token in case["greedy_token_ids"]]
        params = SamplingParams(temperature=0.0, max_tokens=len(wanted))
        (result,) = engine.generate([[int(token) for token in case["prompt_token_ids"]]], params)
        for index, (token, margin) in enumerate(zip(wanted, case["greedy_margins"], strict=True)):
            if result.token_ids[index] != token:
                assert margin < clear, f"token {index} differs at a margin of {margin}"
                break
