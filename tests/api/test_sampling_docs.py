"""Fields of a draw are stated once: what is made from that statement agrees with it."""

from __future__ import annotations

from pathlib import Path

from octavo.api.sampling_docs import as_markdown
from octavo.api.schemas_chat import ChatRequest
from octavo.api.schemas_completions import CompletionRequest
from octavo.core.sampling_params import SamplingParams, stated_fields


def test_the_page_is_written_from_the_fields() -> None:
    page = Path(__file__).parents[2] / "docs/sampling.md"
    assert page.read_text() == "\n".join(as_markdown()) + "\n", "python -m octavo.api.sampling_docs > docs/sampling.md"


def test_both_endpoints_have_each_field_with_the_engines_default_and_hand_it_on() -> None:
    bodies = {ChatRequest: {"messages": [{"role": "user", "content": "a"}]}, CompletionRequest: {"prompt": "a"}}
    given = {
        "logit_bias": {"5": 1.5}, "allowed_token_ids": [4, 5], "repetition_penalty": 1.25, "presence_penalty": 0.5,
        "frequency_penalty": 0.25, "dry_multiplier": 0.8, "dry_base": 2.5, "dry_allowed_length": 3,
        "dry_penalty_last_n": 64, "temperature": 0.75, "top_k": 7, "typical_p": 0.9, "top_p": 0.8, "min_p": 0.125,
        "xtc_probability": 0.5, "xtc_threshold": 0.25, "seed": 11, "min_tokens": 2, "stop": ["x"],
        "stop_token_ids": [9], "include_stop_str_in_output": True, "ignore_eos": True,
    }  # fmt: skip
    shared = {name for name, (_, _, stated) in stated_fields().items() if stated.in_http}
    assert shared == given.keys()
    for schema, body in bodies.items():
        plain, full = schema.parse(body), schema.parse({**body, **given})
        rest = {"max_tokens": 5, "logprobs": None, "prompt_logprobs": None, "bad_words": (), "breakers": ()}
        assert plain.sampling_params(**rest) == SamplingParams(max_tokens=5)
        made = full.sampling_params(**rest)
        assert made == SamplingParams(max_tokens=5, **{**given, "logit_bias": {5: 1.5}})


def test_what_one_token_is_given_several_times_adds_up_once() -> None:
    assert SamplingParams(logit_bias=((3, 1.5), (4, 2.0), (3, -0.5))).logit_bias == ((3, 1.0), (4, 2.0))
    assert SamplingParams(logit_bias={3: 1}).logit_bias == ((3, 1),)
