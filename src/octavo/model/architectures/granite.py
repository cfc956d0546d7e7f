"""Granite 3 (IBM 2024): Llama with four multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.core.model_config import ModelConfig
from octavo.kernels.base import Weight
from octavo.model.architectures.llama import Llama
from octavo.model.gguf_keys import GGUFKeys
from octavo.model.hf_fields import HFFields


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(ModelConfig):
    """Llama's, and what embeddings, scores and results of a layer are multiplied by, and logits divided."""

    embedding_scale: float
    attention_scale: float
    residual_scale: float
    logits_divisor: float


class Granite(Llama):
    """Its GGUF files interleave Q and K as Llama's do."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight]) -> None:
        assert isinstance(config, GraniteConfig)
        self.embedding_scale, self.attention_scale = config.embedding_scale, config.attention_scale
        self.residual_scale, self.logits_scale = config.residual_scale, 1.0 / config.logits_divisor
        super().__init__(config, weights)

    @classmethod
    def from_gguf(cls, keys: GGUFKeys) -> ModelConfig:
        """The shape that a GGUF file describes."""
        names = ("embedding_scale", "attention.scale", "residual_scale", "logit_scale")
        return keys.decoder(
            GraniteConfig,
            also_known={"tensor_data_layout", *names},
            attention_bias=keys.has_tensor("blk.0.attn_q.bias"),
            mlp_bias=keys.has_tensor("blk.0.ffn_down.bias"),
            embedding_scale=keys.real("embedding_scale", default=1.0),
            attention_scale=keys.real("attention.scale", default=keys.head_dim() ** -0.5),
            residual_scale=keys.real("residual_scale", default=1.0),
            logits_divisor=keys.real("logit_scale", default=1.0),
        )

    @classmethod
    def from_hf(cls, fields: HFFields) -> ModelConfig:
        """The shape that a config.json describes."""
        return fields.decoder(
            GraniteConfig,
            attention_bias=fields.flag("attention_bias", default=False),
            mlp_bias=fields.flag("mlp_bias", default=False),
            embedding_scale=fields.real("embedding_multiplier", default=1.0),
            attention_scale=fields.real("attention_multiplier", default=1.0),
            residual_scale=fields.real("residual_multiplier", default=1.0),
            logits_divisor=fields.real("logits_scaling", default=1.0),
        )
