"""Phi-3 (Abdin et al. 2024, arXiv:2404.14219) and Phi-4: Llama with fused projections, partial and long RoPE."""

from __future__ import annotations

from octavo.core.model_config import ModelConfig
from octavo.model.architectures.llama import NAMES, Llama
from octavo.model.gguf_keys import GGUFKeys
from octavo.model.hf_fields import HFFields
from octavo.model.tensor_names import TensorNames

FUSED_MLP = {"layers.{i}.gate_up": ("blk.{i}.ffn_up", "model.layers.{i}.mlp.gate_up_proj")}
_APART = {f"layers.{{i}}.{part}" for part in ("q", "k", "v", "gate", "up")}


class Phi3(Llama):
    """Files have queries, keys and values as one matrix, and gate and up as another."""

    names = TensorNames(
        {
            **{name: files for name, files in NAMES.items() if name not in _APART},
            **FUSED_MLP,
            "layers.{i}.qkv": ("blk.{i}.attn_qkv", "model.layers.{i}.self_attn.qkv_proj"),
        }
    )
    interleaved = frozenset()
    fused = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}  # noqa: RUF012

    @classmethod
    def from_gguf(cls, keys: GGUFKeys) -> ModelConfig:
        """The shape that a GGUF file describes. A window of 0 is none."""
        window = keys.whole("attention.sliding_window", 1 << 24, low=0, default=0)
        return keys.decoder(also_known={"attention.sliding_window"}, sliding_window=window or None)

    @classmethod
    def from_hf(cls, fields: HFFields) -> ModelConfig:
        """The shape that a config.json describes."""
        return fields.decoder(default_eps=1e-5, rope=fields.rope(), sliding_window=fields.window())
