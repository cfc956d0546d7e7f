"""Mistral (Jiang et al. 2023, arXiv:2310.06825), and Ministral 3, whose queries grow with their position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.core.model_config import ModelConfig
from octavo.kernels.base import PositionScale, Weight
from octavo.model.architectures.llama import Llama
from octavo.model.gguf_keys import GGUFKeys
from octavo.model.hf_fields import HFFields


@dataclass(frozen=True, slots=True, kw_only=True)
class MinistralConfig(ModelConfig):
    """Llama's, and by how much queries grow."""

    query_growth: PositionScale | None


class Mistral(Llama):
    """Llama whose layers may all look through a window. Its GGUF files call themselves llama."""

    @classmethod
    def from_hf(cls, fields: HFFields) -> ModelConfig:
        """The shape that a config.json describes."""
        return fields.decoder(sliding_window=fields.window())


class Ministral3(Mistral):
    """YaRN, and attention temperature as Llama 4 has it: steps of the original context."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight]) -> None:
        self.growth = config.query_growth if isinstance(config, MinistralConfig) else None
        super().__init__(config, weights)

    @classmethod
    def from_gguf(cls, keys: GGUFKeys) -> ModelConfig:
        """The shape that a GGUF file describes."""
        beta = keys.real("attention.temperature_scale", low=0.0, default=0.0)
        scaling = keys.rope().scaling
        length = scaling.original_context if scaling is not None else keys.whole("context_length", 1 << 24)
        growth = PositionScale(beta=beta, length=length) if beta else None
        return keys.decoder(
            MinistralConfig,
            also_known={"tensor_data_layout", "attention.temperature_scale"},
            query_growth=growth,
        )

    @classmethod
    def from_hf(cls, fields: HFFields) -> ModelConfig:
        """The shape that a config.json describes."""
        rope = fields.rope(also_known={"llama_4_scaling_beta", "max_position_embeddings"})
        section = fields.values.get("rope_parameters")
        beta = section.get("llama_4_scaling_beta") if isinstance(section, dict) else None
        if beta is not None and (isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta < 1e6):
            fields.fail(f"llama_4_scaling_beta is {beta!r} but must be a number from 0")
        growth = None
        if beta and rope.scaling is not None:
            growth = PositionScale(beta=float(beta), length=rope.scaling.original_context)
        return fields.decoder(
            MinistralConfig, default_eps=1e-5, rope=rope, sliding_window=fields.window(), query_growth=growth
        )
