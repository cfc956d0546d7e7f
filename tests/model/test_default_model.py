"""Real files, in float32, against what transformers made of the same weights."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from octavo.core.plan import DrawRule
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.base import KVCacheLayout
from octavo.kernels.torch.backend import TorchBackend
from octavo.model.decoder import load
from octavo.model.open_model import open_weights
from random_model import make_step

MARGIN = 0.02  # closer than this, another rounding may pick the other token
NUM_BLOCKS = 512


#: name of the reference -> environment variable with the path of a file that is not fetched by itself
FILES = {"smollm2": None, "qwen2": "OCTAVO_TEST_QWEN2"}


@pytest.fixture(scope="module", params=FILES)
def real(request):
    """(name of the reference, path of the file); tests/data/README.md says where to get the optional ones."""
    variable = FILES[request.param]
    if variable is None:
        return request.param, request.getfixturevalue("model_path")
    if variable not in os.environ:
        pytest.skip(f"{variable} names no file")
    return request.param, os.environ[variable]


@pytest.fixture(scope="module")
def backend(real):
    source = open_weights(real[1])
    backend, c = TorchBackend(source.config, device="cpu", dtype="float32"), source.config
    backend.allocate_kv_cache(
        KVCacheLayout.full(
            num_layers=c.num_layers,
            num_blocks=NUM_BLOCKS,
            block_size=16,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
        )
    )
    backend.bind(load(source, backend), max_tokens=2048, max_seqs=64)
    yield backend
    backend.close()
    source.close()


@pytest.mark.slow
def test_logprobs_and_greedy_tokens_equal_the_reference(backend, real, data_dir):
    draw = DrawRule(params=SamplingParams(temperature=0.0, logprobs=10), random_stream=0)
    for case in json.loads((data_dir / f"{real[0]}_reference.json").read_text()):
        prompt, greedy = case["prompt_token_ids"], case["greedy_token_ids"]
        tokens = prompt + greedy[:-1]  # teacher-forced
        step = make_step([(0, tokens)], [np.random.default_rng(0).permutation(NUM_BLOCKS)], 16, all_logits=True)
        before = len(prompt) - 1
        step.logit_rows[:] = np.roll(step.logit_rows, -before)  # the rows of draws come first
        out = backend.run(step, [draw] * len(greedy), [(token, 0) for token in prompt[1:]])

        logprobs = [token.logprob for token in out.row_logprobs]
        assert logprobs == pytest.approx(case["prompt_logprobs"][1:], abs=2e-3)
        top, want = dict(out.tokens[0].top), dict(case["next_top10"])
        assert top.keys() == want.keys()
        assert top == pytest.approx(want, abs=2e-3)
        drawn = [token.token_id for token in out.tokens]
        differ = [m for a, b, m in zip(drawn, greedy, case["greedy_margins"], strict=True) if a != b]
        assert all(margin < MARGIN for margin in differ)


@pytest.mark.slow
def test_free_running_batched_decodes_give_the_reference_text_up_to_the_first_close_margin(backend, real, data_dir):
    cases = json.loads((data_dir / f"{real[0]}_reference.json").read_text())
    cases.sort(key=lambda case: len(case["prompt_token_ids"]) > 1)  # one-query sequences come first
    prompts = [case["prompt_token_ids"] for case in cases]
    width = NUM_BLOCKS // len(cases)
    tables = np.random.default_rng(1).permutation(NUM_BLOCKS)[: width * len(cases)].reshape(len(cases), width)
    draw = DrawRule(params=SamplingParams(temperature=0.0), random_stream=0)
    texts: list[list[int]] = [[] for _ in cases]
    chunks = [(0, prompt) for prompt in prompts]
    for _ in range(48):
        out = backend.run(make_step(chunks, tables, 16), [draw] * len(cases))
        for text, token in zip(texts, out.tokens, strict=True):
            text.append(token.token_id)
        chunks = [(len(prompt) + len(text) - 1, text[-1:]) for prompt, text in zip(prompts, texts, strict=True)]
    for case, text in zip(cases, texts, strict=True):
        sure = next((i for i, margin in enumerate(case["greedy_margins"]) if margin < MARGIN), None)
        want = case["greedy_token_ids"][:sure]
        assert text[: len(want)] == want
