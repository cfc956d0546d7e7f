"""Gemma 2 (Gemma Team 2024, arXiv:2408.00118): norms before and after, soft caps, a window in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.core.model_config import ModelConfig
from octavo.kernels.base import Weight
from octavo.model.architectures.llama import NAMES, SandwichNorm, by_layer
from octavo.model.gguf_keys import GGUFKeys
from octavo.model.hf_fields import HFFields
from octavo.model.tensor_names import TensorNames

GEMMA_NAMES = {
    **NAMES,
    "layers.{i}.post_attention_norm": ("blk.{i}.post_attention_norm", "model.layers.{i}.post_attention_layernorm"),
    "layers.{i}.mlp_norm": ("blk.{i}.ffn_norm", "model.layers.{i}.pre_feedforward_layernorm"),
    "layers.{i}.post_mlp_norm": ("blk.{i}.post_ffw_norm", "model.layers.{i}.post_feedforward_layernorm"),
}
_ACTIVATION = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(ModelConfig):
    """Llama's, and what scores are multiplied by."""

    attention_scale: float


class Gemma2(SandwichNorm):
    """Embeddings times sqrt(hidden), GELU, gains that safetensors store less 1."""

    names = TensorNames(GEMMA_NAMES)
    interleaved = frozenset()
    unit_offset = True
    layers_of_27b = 46  # GGUF files do not say query_pre_attn_scalar; llama.cpp knows it by the number of layers
    window_step = 2  # every so many layers one sees everything

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight]) -> None:
        assert isinstance(config, GemmaConfig)
        self.embedding_scale = config.hidden_size**0.5
        self.attention_scale = config.attention_scale
        super().__init__(config, weights)

    @classmethod
    def from_gguf(cls, keys: GGUFKeys) -> ModelConfig:
        """The shape that a GGUF file describes."""
        window = keys.whole("attention.sliding_window", 1 << 24, default=4096)
        sliding = keys.every("attention.sliding_window_pattern", cls.window_step, keys.num_layers())
        return keys.decoder(
            GemmaConfig,
            also_known={
                "attention.sliding_window",
                "attention.sliding_window_pattern",
                "attn_logit_softcapping",
                "final_logit_softcapping",
            },
            attention_scale=cls.scale_in_gguf(keys),
            layer_windows=by_layer(sliding, window, None),
            attention_soft_cap=keys.real("attn_logit_softcapping", default=50.0),
            logits_soft_cap=keys.real("final_logit_softcapping", default=30.0),
            hidden_act="gelu",
        )

    @classmethod
    def scale_in_gguf(cls, keys: GGUFKeys) -> float:
        """1 / sqrt(head_dim), but of the largest model 1 / sqrt(hidden / heads)."""
        hidden, heads = keys.whole("embedding_length", 1 << 20), keys.whole("attention.head_count", 1 << 12)
        per_head = max(1, hidden // heads)
        if keys.num_layers() == cls.layers_of_27b:
            return float(per_head**-0.5)
        return float(keys.whole("attention.key_length", 1 << 10, default=per_head) ** -0.5)

    @classmethod
    def from_hf(cls, fields: HFFields) -> ModelConfig:
        """The shape that a config.json describes."""
        check_gemma(fields)
        sliding, window = fields.sliding_layers(lambda i: (i + 1) % cls.window_step != 0), fields.window()
        return fields.decoder(
            GemmaConfig,
            activation="hidden_activation",
            hidden_act="gelu",
            attention_scale=fields.real("query_pre_attn_scalar", default=256.0) ** -0.5,
            layer_windows=by_layer(sliding, window, None),
            attention_soft_cap=soft_cap(fields, "attn_logit_softcapping"),
            logits_soft_cap=soft_cap(fields, "final_logit_softcapping"),
            tied_embeddings=fields.flag("tie_word_embeddings", default=True),
            attention_bias=fields.flag("attention_bias", default=False),
        )


def check_gemma(fields: HFFields) -> None:
    """Raise ``ModelFileError`` for what changes the arithmetic and is not supported."""
    activation = fields.text("hidden_activation", default=_ACTIVATION)
    if activation != _ACTIVATION:
        fields.fail(f"hidden_activation is {activation!r}; supported is {_ACTIVATION}")
    if fields.flag("use_bidirectional_attention", default=False):
        fields.fail("use_bidirectional_attention is on: this is an encoder, which is not supported")


def soft_cap(fields: HFFields, key: str) -> float | None:
    """A cap; null: none."""
    return None if fields.values.get(key) is None else fields.real(key)
