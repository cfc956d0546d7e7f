"""GLM-4 (GLM Team 2024, arXiv:2406.12793), 0414 and later: norms before and after, half of each head rotated."""

from __future__ import annotations

from octavo.core.model_config import ModelConfig
from octavo.model.architectures.llama import NAMES, SandwichNorm
from octavo.model.architectures.phi3 import FUSED_MLP
from octavo.model.gguf_keys import GGUFKeys
from octavo.model.hf_fields import HFFields
from octavo.model.tensor_names import TensorNames

_APART = {"layers.{i}.gate", "layers.{i}.up"}


class Glm4(SandwichNorm):
    """Both formats pair neighbouring rows of Q and K, and have gate and up as one matrix."""

    names = TensorNames(
        {
            **{name: files for name, files in NAMES.items() if name not in _APART},
            **FUSED_MLP,
            "layers.{i}.post_attention_norm": (
                "blk.{i}.post_attention_norm",
                "model.layers.{i}.post_self_attn_layernorm",
            ),
            "layers.{i}.post_mlp_norm": ("blk.{i}.post_ffw_norm", "model.layers.{i}.post_mlp_layernorm"),
        }
    )
    interleaved_in_hf = frozenset({"q", "k"})
    fused = {"gate_up": ("gate", "up")}  # noqa: RUF012

    @classmethod
    def from_gguf(cls, keys: GGUFKeys) -> ModelConfig:
        """The shape that a GGUF file describes."""
        return keys.decoder(attention_bias=keys.has_tensor("blk.0.attn_q.bias"))

    @classmethod
    def from_hf(cls, fields: HFFields) -> ModelConfig:
        """The shape that a config.json describes."""
        return fields.decoder(
            default_eps=1.5625e-7,
            rope=fields.rope(default_share=0.5),
            attention_bias=fields.flag("attention_bias", default=False),
        )

    @classmethod
    def biased(cls, config: ModelConfig) -> frozenset[str]:
        """The linear layers of a block that have a bias."""
        return frozenset("qkv" if config.attention_bias else ())
