"""Small random models for tests: an in-memory weight source, its twin in transformers, and steps made by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from octavo.core.model_config import ModelConfig
from octavo.kernels.base import ModelInput
from octavo.model.decoder import expected_tensors
from octavo.model.weight_source import WeightSource
from octavo.weights.tensor import WeightTensor

TINY_LLAMA = ModelConfig(
    architecture="llama",
    name="tiny-llama",
    hidden_size=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=80,
    vocab_size=131,
    max_position=512,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_dim=16,
    tied_embeddings=True,
)


class MemorySource(WeightSource):
    """Float32 tensors that live in a dict."""

    def __init__(self, config: ModelConfig, arrays: dict[str, np.ndarray]) -> None:
        self.config, self.arrays, self.fingerprint = config, arrays, "memory"

    def names(self) -> Iterable[str]:
        return self.arrays

    def tensor(self, name: str) -> WeightTensor:
        array = np.ascontiguousarray(self.arrays[name], dtype=np.float32)
        return WeightTensor(name=name, shape=array.shape, encoding="F32", data=array.reshape(-1).view(np.uint8))

    def close(self) -> None:
        self.arrays = {}


def random_source(config: ModelConfig = TINY_LLAMA, seed: int = 0) -> MemorySource:
    """Weights of a scale that keeps activations of order one, so that every op matters to the logits."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, shape in expected_tensors(config).items():
        if "norm" in name:
            array = 1.0 + 0.2 * rng.standard_normal(shape)
        elif name.endswith("bias"):
            array = 0.3 * rng.standard_normal(shape)
        elif name == "embedding.weight":
            array = rng.standard_normal(shape)
        else:
            array = rng.standard_normal(shape) * 1.5 / np.sqrt(shape[1])
        arrays[name] = array.astype(np.float32)
    return MemorySource(config, arrays)


def transformers_twin(source: MemorySource) -> Any:
    """The same weights in transformers' own model of that architecture, float32, eager attention."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    c = source.config
    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
    their_config, their_model = kinds[c.architecture]
    special = {"attention_bias": c.attention_bias, "mlp_bias": c.mlp_bias} if c.architecture == "llama" else {}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.rope_scaling is not None:
        rope |= {"rope_type": c.rope_scaling.kind, "factor": c.rope_scaling.factor}
        if c.rope_scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": c.rope_scaling.low_freq_factor,
                "high_freq_factor": c.rope_scaling.high_freq_factor,
                "original_max_position_embeddings": c.rope_scaling.original_context,
            }
    twin = their_model(
        their_config(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            max_position_embeddings=c.max_position,
            rms_norm_eps=c.rms_norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=c.tied_embeddings,
            attn_implementation="eager",
            **special,
        )
    )
    state = {_their_name(name): torch.from_numpy(array) for name, array in source.arrays.items()}
    if c.tied_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    twin.load_state_dict(state, strict=True)
    return twin.eval()


def _their_name(name: str) -> str:
    if name == "embedding.weight":
        return "model.embed_tokens.weight"
    if name == "head.weight":
        return "lm_head.weight"
    if name == "final_norm.weight":
        return "model.norm.weight"
    _, layer, part, kind = name.split(".")
    theirs = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    theirs |= {part: f"self_attn.{part}_proj" for part in "qkvo"}
    theirs |= {part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    return f"model.layers.{layer}.{theirs[part]}.{kind}"


def make_step(
    chunks: Sequence[tuple[int, Sequence[int]]],
    tables: Sequence[Sequence[int]],
    block_size: int,
    *,
    all_logits: bool = False,
    target_rows: Sequence[int] = (),
    copies: Sequence[tuple[int, int, int, int]] = (),
) -> ModelInput:
    """A step from (start, token ids) per sequence and its block table; logits of each last token, or of all.

    target_rows: further rows whose logits are wanted, in ``token_ids``
    """
    starts = np.cumsum([0] + [len(tokens) for _, tokens in chunks])
    positions = np.concatenate([np.arange(start, start + len(tokens)) for start, tokens in chunks])
    blocks = np.zeros((len(chunks), max(map(len, tables))), dtype=np.int32)
    for row, table in zip(blocks, tables, strict=True):
        row[: len(table)] = table
    seqs = np.repeat(np.arange(len(chunks)), [len(tokens) for _, tokens in chunks])
    slots = blocks[seqs, positions // block_size] * block_size + positions % block_size
    one_query = [len(tokens) == 1 for _, tokens in chunks]
    assert one_query == sorted(one_query, reverse=True), "one-query sequences come first"
    return ModelInput.of(
        token_ids=[token for _, tokens in chunks for token in tokens],
        positions=positions,
        slot_mapping=slots,
        logit_rows=[*(range(starts[-1]) if all_logits else starts[1:] - 1), *target_rows],
        query_starts=starts,
        context_lens=[start + len(tokens) for start, tokens in chunks],
        block_tables=list(blocks),
        copies=copies,
    )


def variant(**changes: Any) -> ModelConfig:
    """TINY_LLAMA with some fields changed."""
    return replace(TINY_LLAMA, **changes)
