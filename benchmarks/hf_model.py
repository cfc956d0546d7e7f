"""A transformers model with octavo's weights: the same numbers, dequantised by octavo's reader."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.core.model_config import ModelConfig
from octavo.model.weight_source import WeightSource

_LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_TOP_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def load_llama(source: WeightSource, dtype: torch.dtype) -> Any:
    """The ``LlamaForCausalLM`` with these weights. ValueError for what this translation does not cover.

    Beside the model itself one tensor is in memory at a time.
    """
    config = _llama_config(source.config)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model = model.to(dtype).to_empty(device="cpu")
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(config=config)  # computed, so not among the weights
    parameters = dict(model.named_parameters())  # a tied head is not named again
    if missing := parameters.keys() ^ {hf_name(name) for name in source.names()}:
        raise ValueError(f"{source.config.name}: weights and model do not fit: {sorted(missing)[:4]}")
    with torch.no_grad():
        for name in source.names():
            parameters[hf_name(name)].copy_(torch.from_numpy(source.tensor(name).to_float32()))
    return model.eval()


def hf_name(name: str) -> str:
    """``layers.3.q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _llama_config(config: ModelConfig) -> LlamaConfig:
    if config.architecture != "llama" or config.rope_scaling is not None or config.rope_dim != config.head_dim:
        raise ValueError(f"{config.name}: only llama models with plain rotary embeddings are compared here")
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied_embeddings,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )


@dataclass(slots=True)
class TokenTimes:
    """Takes the tokens of ``generate`` as they come, with the time of each. The first ``put`` is the prompt."""

    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    prompt_seen: bool = False

    def put(self, value: torch.Tensor) -> None:
        if self.prompt_seen:
            self.times.append(time.perf_counter())
            self.token_ids.extend(value.tolist())
        self.prompt_seen = True

    def end(self) -> None:
        """Nothing is buffered."""


def generate(model: Any, prompt_token_ids: list[int], max_tokens: int, *, temperature: float = 0.0) -> TokenTimes:
    """Exactly ``max_tokens`` tokens after the prompt, greedy at temperature 0, else from the whole distribution."""
    taken = TokenTimes()
    ids = torch.tensor([prompt_token_ids])
    draw: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        draw = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(max_new_tokens=max_tokens, eos_token_id=None, pad_token_id=0, **draw)
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=taken)
    return taken
