"""One row per architecture: a small config for transformers, and how llama.cpp's converter says the same in GGUF.

The GGUF side is written by hand from llama.cpp's conversion scripts and ``gguf``'s own table of tensor names, so that
it does not come from what it tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.text.dummy_vocabulary import dummy_vocabulary
from octavo.weights.gguf_writer import write_gguf

Arrays = dict[str, NDArray[np.float32]]
VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 300, 64, 4, 2, 16

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
#: Of every file. Keys below are without the architecture's name before them.
KEYS: dict[str, Any] = {
    "block_count": 2,
    "context_length": 256,
    "embedding_length": HIDDEN,
    "feed_forward_length": 96,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": HEAD_DIM,
    "rope.freq_base": 10_000.0,
    "vocab_size": VOCAB,
}


@dataclass(frozen=True)
class Case:
    """model_type: transformers' name; config: what differs from SHAPE. arch: llama.cpp's name, None: not converted.

    keys: what differs from KEYS, None: left out. as_in_gguf: what the converter does to a tensor. context: longest
    sequence that the model is loaded for, where that chooses its table of rotations.
    """

    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    arch: str | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)
    as_in_gguf: Callable[[str, NDArray[np.float32]], NDArray[np.float32]] = lambda name, x: x
    extra: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    context: int | None = None


def permuted(name: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """LlamaModel.permute: the halves of each head of Q and K become neighbours."""
    if not any(part in name for part in ("q_proj", "k_proj")):
        return x
    heads = HEADS if "q_proj" in name else KV_HEADS
    return x.reshape(heads, 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(x.shape)


def plus_one(name: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Gemma's norms."""
    return x + np.float32(1.0) if name.endswith("norm.weight") else x


def queries_first(name: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """GPTNeoXModel: the heads' parts of query_key_value, sorted by part."""
    if "query_key_value" not in name:
        return x
    return x.reshape(HEADS, 3, HEAD_DIM, -1).swapaxes(0, 1).reshape(x.shape)


LONG, SHORT = (np.linspace(low, high, 6) for low, high in ((2.0, 9.0), (1.0, 1.5)))
YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "beta_fast": 8.0, "beta_slow": 1.0,
}  # fmt: skip
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
    "rope.scaling.yarn_beta_fast": 8.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
WINDOW = {"sliding_window": 12}
NO_HEAD_DIM = {"head_dim": None}
LAYER_NORM = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5}
PATTERN = {"attention.sliding_window": 12, "attention.sliding_window_pattern": (True, True, True, False)}
TYPES4 = ["sliding_attention"] * 3 + ["full_attention"]

CASES: dict[str, Case] = {
    "qwen2": Case("qwen2", NO_HEAD_DIM, "qwen2", {"attention.layer_norm_rms_epsilon": 1e-6}),
    "qwen3": Case("qwen3", {"rms_norm_eps": 1e-5}, "qwen3"),
    "qwen3, tied": Case("qwen3", {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}, "qwen3"),
    "llama, linear": Case(
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}, "rms_norm_eps": 1e-5},
        "llama",
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        permuted,
    ),
    "llama, llama3": Case(
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "llama, yarn": Case(
        "llama", {"rope_parameters": YARN, "rms_norm_eps": 1e-5}, "llama", YARN_KEYS, permuted
    ),
    "llama, dynamic": Case(
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
         "max_position_embeddings": 48},
        context=96,
    ),
    "mistral": Case("mistral", {**WINDOW, "rms_norm_eps": 1e-5}),
    "mistral as llama": Case(
        "mistral", {"sliding_window": None, "rms_norm_eps": 1e-5}, "llama", {}, permuted
    ),
    "ministral3": Case(
        "ministral3",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}},
        "mistral3",
        {**YARN_KEYS, "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.3},
        permuted,
    ),
    "gemma2": Case(
        "gemma2",
        {**WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 25.0,
         "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        "gemma2",
        {"attention.sliding_window": 12, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 25.0},
        plus_one,
    ),
    "gemma3": Case(
        "gemma3_text",
        {**WINDOW, "num_hidden_layers": 7, "query_pre_attn_scalar": 16, "rms_norm_eps": 1e-5,
         "tie_word_embeddings": True, "rope_parameters": {
             "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100_000.0},
             "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}},
        "gemma3",
        {"block_count": 7, "attention.sliding_window": 12, "rope.freq_base": 100_000.0, "rope.scaling.type": "linear",
         "rope.scaling.factor": 8.0},
        plus_one,
    ),
    "phi3": Case(
        "phi3",
        {**NO_HEAD_DIM, **WINDOW, "rms_norm_eps": 1e-5},
        "phi3",
        {"attention.sliding_window": 12, "rope.scaling.original_context_length": 256},
    ),
    **{
        f"phi3, longrope, {context}": Case(
            "phi3",
            {**NO_HEAD_DIM, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 64, "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10_000.0, "long_factor": LONG.tolist(),
                "short_factor": SHORT.tolist(), "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 64}},
            "phi3",
            {"attention.sliding_window": 0, "rope.scaling.original_context_length": 64, "rope.dimension_count": 12,
             "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(4.0) / np.log(64.0)))},
            extra={"rope_factors_long.weight": LONG, "rope_factors_short.weight": SHORT},
            context=context,
        )
        for context in (60, 96)
    },
    "granite": Case(
        "granite",
        {**NO_HEAD_DIM, "rms_norm_eps": 1e-5, "embedding_multiplier": 3.0, "attention_multiplier": 0.2,
         "residual_multiplier": 0.4, "logits_scaling": 2.5},
        "granite",
        {"embedding_scale": 3.0, "attention.scale": 0.2, "residual_scale": 0.4, "logit_scale": 2.5},
        permuted,
    ),
    "smollm3": Case(
        "smollm3",
        {**NO_HEAD_DIM, "num_hidden_layers": 5, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_parameters":
         {"rope_type": "default", "rope_theta": 500_000.0}},
        "smollm3",
        {"block_count": 5, "rope.freq_base": 500_000.0},
        permuted,
    ),
    "olmo2": Case("olmo2", {**NO_HEAD_DIM, "rms_norm_eps": 1e-5}, "olmo2"),
    "olmo3": Case(
        "olmo3",
        {**NO_HEAD_DIM, **WINDOW, "num_hidden_layers": 4, "layer_types": TYPES4, "rms_norm_eps": 1e-5,
         "rope_parameters": {"full_attention": YARN,
                             "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}},
        "olmo2",
        {"block_count": 4, **PATTERN, **YARN_KEYS},
    ),
    "glm4": Case(
        "glm4",
        {"rms_norm_eps": 1e-5, "attention_bias": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}},
        "glm4",
        {"rope.dimension_count": HEAD_DIM // 2},
    ),
    "exaone4": Case(
        "exaone4",
        {**NO_HEAD_DIM, **WINDOW, "num_hidden_layers": 4, "layer_types": TYPES4, "rms_norm_eps": 1e-5},
        "exaone4",
        {"block_count": 4, **PATTERN},
    ),
    "exaone4, no windows": Case(
        "exaone4",
        {**NO_HEAD_DIM, "sliding_window": None, "layer_types": ["full_attention"] * 2, "rms_norm_eps": 1e-5},
        "exaone4",
    ),
    "cohere2": Case(
        "cohere2",
        {**NO_HEAD_DIM, **WINDOW, "num_hidden_layers": 4, "layer_types": TYPES4, "logit_scale": 0.3,
         "tie_word_embeddings": True},
        "cohere2",
        {"block_count": 4, "attention.sliding_window": 12, "logit_scale": 0.3, "rope.scaling.type": "none",
         **LAYER_NORM},
    ),
    "starcoder2": Case(
        "starcoder2", {**NO_HEAD_DIM, **WINDOW, "norm_epsilon": 1e-5}
    ),
    "starcoder2, no window": Case(
        "starcoder2",
        {**NO_HEAD_DIM, "sliding_window": None, "norm_epsilon": 1e-5, "tie_word_embeddings": True},
        "starcoder2",
        LAYER_NORM,
    ),
    "gpt_neox": Case(
        "gpt_neox",
        {**NO_HEAD_DIM, "num_key_value_heads": None, "layer_norm_eps": 1e-5, "rope_parameters": {
            "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}},
        "gptneox",
        {"attention.head_count_kv": None, "rope.dimension_count": HEAD_DIM // 4, "use_parallel_residual": True,
         **LAYER_NORM},
        queries_first,
    ),
}  # fmt: skip


def twin_of(case: Case) -> Any:
    """A random model of transformers, float32, whose every tensor matters to the logits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in {**SHAPE, **case.config}.items() if name not in _LEFT_OUT or value}
    twin = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(case.model_type, **fields), attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(5)
    less_one = case.model_type.startswith("gemma")
    with torch.no_grad():
        for name, tensor in twin.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                tensor.copy_(0.2 * noise + (0.0 if less_one else 1.0))
            elif name.endswith("bias"):
                tensor.copy_(0.3 * noise)
            elif "embed" in name:
                tensor.copy_(noise)
            else:
                tensor.copy_(noise * 1.5 / tensor.shape[1] ** 0.5)
    return twin


_LEFT_OUT = {"head_dim", "num_key_value_heads"}


def write_twin(case: Case, twin: Any, path: Path) -> None:
    """The twin's weights as llama.cpp's converter would write them."""
    import gguf

    assert case.arch is not None
    keys = {name: value for name, value in {**KEYS, **case.keys}.items() if value is not None}
    kinds = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[case.arch], keys["block_count"])
    tensors: Arrays = {name: np.asarray(x, np.float32) for name, x in case.extra.items()}
    for name, tensor in twin.state_dict().items():
        if name.endswith("lm_head.weight") and twin.config.tie_word_embeddings:
            continue
        file_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert file_name is not None, name
        tensors[file_name] = case.as_in_gguf(name, tensor.numpy())
    metadata = {
        "general.architecture": case.arch,
        "general.name": "random",
        **{f"{case.arch}.{name}": value for name, value in keys.items()},
        **dummy_vocabulary(VOCAB),
    }
    data = [np.ascontiguousarray(x, "<f4").reshape(-1).view(np.uint8) for x in tensors.values()]
    write_gguf(path, metadata, {name: ("F32", x.shape) for name, x in tensors.items()}, data)
