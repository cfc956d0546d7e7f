"""Every architecture with made-up weights, without transformers: what runs together changes no bit, torch agrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architecture_cases import CASES, SHAPE, VOCAB, Case

from octavo.core.errors import ModelFileError
from octavo.core.model_config import RopeScaling
from octavo.kernels.base import Backend, KVCacheLayout, ModelInput
from octavo.kernels.native.backend import NativeBackend
from octavo.kernels.torch.backend import TorchBackend
from octavo.model.decoder import load
from octavo.model.dummy import DummyWeights, open_dummy
from random_model import make_step

TOKENS = np.random.default_rng(2).integers(0, VOCAB, 50).tolist()


def config_json(case: Case, **changes: Any) -> dict[str, Any]:
    fields = {"model_type": case.model_type, **SHAPE, **case.config, **changes}
    return {name: value for name, value in fields.items() if value is not None}


def dummy(folder: Path, fields: dict[str, Any], encoding: Any = "F32") -> DummyWeights:
    (folder / "config.json").write_text(json.dumps(fields))
    return open_dummy(folder, encoding)


def hidden(backend: Backend, source: DummyWeights, case: Case, sizes: tuple[int, ...]) -> Any:
    """Hidden rows of the tokens in chunks of these sizes."""
    c, found, start = source.config, [], 0
    backend.bind(load(source, backend, case.context), max_tokens=64, max_seqs=2)
    backend.allocate_kv_cache(
        KVCacheLayout.full(
            num_layers=c.num_layers, num_blocks=8, block_size=16, num_kv_heads=c.num_kv_heads, head_dim=c.head_dim
        )
    )
    first = make_step([(0, TOKENS[: sizes[0]])], [[3, 1, 5, 2]], 16)
    assert backend.run(without_rows(first), []).tokens == []  # as a chunk does that ends before the last token
    for size in sizes:
        step = make_step([(start, TOKENS[start : start + size])], [[3, 1, 5, 2]], 16, target_rows=range(size - 1))
        order = [size - 1, *range(size - 1)] if size > 1 else [0]
        targets = [(0, 0)] * size
        rows = backend.run(step, [], targets, hidden_rows=range(size)).hidden
        found.append(rows[np.argsort(order)])
        start += size
    backend.close()
    return np.concatenate(found)


def without_rows(step: ModelInput) -> ModelInput:
    return ModelInput.of(
        token_ids=step.token_ids,
        positions=step.positions,
        slot_mapping=step.slot_mapping.reshape(-1),
        logit_rows=(),
        query_starts=step.query_starts,
        context_lens=step.context_lens,
        block_tables=list(step.block_tables[0]),
    )


@pytest.mark.parametrize("encoding", ["F32", "Q4_1"])
@pytest.mark.parametrize("name", CASES)
def test_fusing_and_chunks_change_no_bit_and_torch_agrees(name: str, encoding: str, tmp_path: Path) -> None:
    case = CASES[name]
    source = dummy(tmp_path, config_json(case), encoding)
    whole, pieces = (50,), (1, 13, 1, 20, 15)

    def native(fused: bool) -> NativeBackend:
        return NativeBackend(source.config, 2, "exact", "float32", fused=fused, activations="int8")

    wanted = hidden(native(True), source, case, whole)
    assert np.isfinite(wanted).all()
    np.testing.assert_array_equal(hidden(native(False), source, case, whole), wanted)
    np.testing.assert_array_equal(hidden(native(True), source, case, pieces), wanted)
    by_torch = hidden(TorchBackend(source.config, device="cpu", threads=1), source, case, pieces)
    if encoding == "F32":
        np.testing.assert_allclose(by_torch, wanted, atol=1e-4)
    else:  # rows rounded to int8 in every product
        assert np.abs(by_torch - wanted).mean() < 0.1 * np.abs(wanted).mean() + 0.02


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0 but must be a number above 0"),
        ("gemma3", {"use_bidirectional_attention": True}, "this is an encoder"),
        ("gemma3", {"layer_types": ["sliding_attention"]}, "layer_types must be a list of 7 times"),
        ("gemma3", {"layer_types": ["linear_attention"] * 7}, "layer_types must be a list of 7 times"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window is on"),
        ("smollm3", {"no_rope_layers": [1, 2, 1, 1, 1]}, "no_rope_layers must be a list of 5 times 0 or 1"),
        ("gpt_neox", {"use_parallel_residual": False}, "use_parallel_residual is off"),
        ("mistral", {"sliding_window": -1}, "sliding_window is -1"),
        ("granite", {"attention_multiplier": "x"}, "attention_multiplier is 'x'"),
        ("phi3, longrope, 60", {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}},
         "short_factor must be a list"),
        ("ministral3", {"rope_parameters": {"rope_type": "yarn", "llama_4_scaling_beta": "a", "factor": 2.0}},
         "llama_4_scaling_beta is 'a'"),
        ("llama, dynamic", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "alpha": 3}}, "alpha is 3"),
        ("glm4", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.45}},
         "7 rotary dimensions must be an even number"),
    ],
)  # fmt: skip
def test_what_changes_the_arithmetic_and_is_not_understood_is_named(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=message):
        dummy(tmp_path, config_json(CASES[name], **changes))


def test_yarn_reaches_beyond_the_context_that_the_file_says(tmp_path: Path) -> None:
    """Qwen2.5's cards say to add the scaling and leave max_position_embeddings as it is."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert dummy(tmp_path, config_json(CASES["qwen2"], rope_scaling=scaling)).config.max_position == 1024


def test_the_config_of_gemma_3_4b_leaves_out_what_is_the_same_in_its_family(tmp_path: Path) -> None:
    """As it is published: nothing about heads, vocabulary or thetas."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
    config = dummy(tmp_path, {"model_type": "gemma3", "text_config": text}).config
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
    assert (config.architecture, config.tied_embeddings, config.max_position) == ("gemma3_text", True, 131_072)
    local, full = config.ropes[4], config.ropes[5]
    assert local is not None
    assert full is not None
    assert (local.theta, local.scaling, config.windows[4]) == (10_000.0, None, 1024)
    assert (full.theta, config.windows[5]) == (1_000_000.0, None)
    assert full.scaling == RopeScaling(kind="linear", factor=8.0)


def test_a_fused_matrix_of_other_rows_than_its_parts_is_named(tmp_path: Path) -> None:
    from octavo.model.registry import find_architecture
    from octavo.model.tensor_pieces import pieces_of

    config = dummy(tmp_path, config_json(CASES["phi3"])).config
    with pytest.raises(ModelFileError, match=r"layers\.1\.qkv\.weight has 127 rows but q, k, v have 128"):
        pieces_of(find_architecture("phi3"), config, "layers.1.qkv.weight", (127, 64), "hf")


def test_one_table_of_rotations_is_chosen_for_the_longest_context(tmp_path: Path) -> None:
    from octavo.model.decoder import settled_config

    config = dummy(tmp_path, config_json(CASES["phi3, longrope, 60"])).config
    short, long = (settled_config(config, context).ropes[0].scaling for context in (64, 65))  # type: ignore[union-attr]
    assert short is not None
    assert long is not None
    assert (short.divisors[-1], long.divisors[-1]) == (1.5, 9.0)
    dynamic = dummy(tmp_path, config_json(CASES["llama, dynamic"])).config
    assert dynamic.max_position == 96
    thetas = [settled_config(dynamic, context).ropes[0].theta for context in (10, 48, 96)]  # type: ignore[union-attr]
    assert thetas[0] == thetas[1] == 10_000.0
    assert thetas[2] == pytest.approx(10_000.0 * 3.0 ** (16 / 14))
