"""The tables of rotations against transformers' own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from octavo.core.errors import ModelFileError
from octavo.core.model_config import RopeScaling, RopeTable
from octavo.kernels.reference.rope import (
    attention_factor,
    inverse_frequencies,
    longrope_attention_factor,
    rotation_table,
    yarn_attention_factor,
)

DIM = 64
LONG = tuple(1.0 + 0.37 * i for i in range(DIM // 2))
YARN: dict[str, Any] = {"kind": "yarn", "factor": 8.0, "original_context": 4096}

CASES: dict[str, tuple[float, RopeScaling, dict[str, Any]]] = {
    "linear": (1e4, RopeScaling(kind="linear", factor=2.5), {"rope_type": "linear", "factor": 2.5}),
    "llama3": (
        5e5,
        RopeScaling(kind="llama3", factor=8.0, original_context=8192),
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192},
    ),
    "yarn": (
        1e6,
        RopeScaling(**YARN, attention_factor=yarn_attention_factor(8.0)),
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096},
    ),
    "yarn of whole and broken pairs": (
        1e4,
        RopeScaling(**YARN, truncate=False, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5),
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "truncate": False,
         "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5},
    ),
    "yarn of DeepSeek": (
        1e4,
        RopeScaling(**YARN, attention_factor=yarn_attention_factor(8.0, 1.0, 0.7)),
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
         "mscale_all_dim": 0.7},
    ),
    "longrope": (
        1e4,
        RopeScaling(kind="longrope", divisors=LONG, attention_factor=longrope_attention_factor(8.0, 4096)),
        {"rope_type": "longrope", "long_factor": list(LONG), "short_factor": [1.0] * (DIM // 2),
         "original_max_position_embeddings": 4096},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_attention_factor_are_those_of_transformers(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theta, scaling, theirs = CASES[name]
    config = LlamaConfig(
        hidden_size=4 * DIM, num_attention_heads=4, head_dim=DIM, max_position_embeddings=32768,
        rope_parameters={**theirs, "rope_theta": theta},
    )  # fmt: skip
    frequencies, factor = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, "cpu", seq_len=32768)
    table = RopeTable(theta=theta, dim=DIM, scaling=scaling)
    np.testing.assert_allclose(inverse_frequencies(table), frequencies.numpy(), rtol=3e-6)
    assert attention_factor(table) == pytest.approx(factor, rel=1e-6)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones_by_the_factor() -> None:
    plain = inverse_frequencies(RopeTable(theta=1e4, dim=DIM))
    ratio = plain / inverse_frequencies(RopeTable(theta=1e4, dim=DIM, scaling=RopeScaling(**YARN)))
    assert np.all(np.diff(ratio) >= 0)
    turns = 4096 * plain / (2 * math.pi)
    np.testing.assert_allclose(ratio[turns > 45], 1.0)  # the first whole pair beyond 32 turns
    np.testing.assert_allclose(ratio[turns < 0.7], 8.0)


def test_the_attention_factor_is_in_cos_and_sin() -> None:
    scaling = RopeScaling(kind="yarn", factor=2.0, attention_factor=1.25)
    cos, sin = rotation_table(RopeTable(theta=1e4, dim=8, scaling=scaling), 50)
    np.testing.assert_allclose(cos.astype(float) ** 2 + sin.astype(float) ** 2, 1.25**2, rtol=1e-6)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (RopeScaling(kind="longrope", divisors=(1.0, 2.0)), "2 divisors but 4 pairs"),
        (RopeScaling(kind="yarn", beta_fast=1.0, beta_slow=2.0), r"0 < beta_slow <= beta_fast"),
        (RopeScaling(kind="llama3", low_freq_factor=4.0), "must exceed low_freq_factor"),
        (RopeScaling(kind="dynamic"), "'dynamic' is not supported"),
    ],
)
def test_numbers_that_make_no_table_are_named(scaling: RopeScaling, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        inverse_frequencies(RopeTable(theta=1e4, dim=8, scaling=scaling))
