"""Qwen3 (Yang et al. 2025, arXiv:2505.09388): Llama with a norm over each head of queries and keys."""

from __future__ import annotations

from octavo.core.model_config import ModelConfig
from octavo.model.architectures.llama import NAMES, QK_NORMS, Llama
from octavo.model.architectures.qwen2 import refuse_sliding_window
from octavo.model.gguf_keys import GGUFKeys
from octavo.model.hf_fields import HFFields
from octavo.model.tensor_names import TensorNames


class Qwen3(Llama):
    """Its GGUF files keep Q and K in the order in which they are trained."""

    names = TensorNames({**NAMES, **QK_NORMS})
    interleaved = frozenset()
    qk_norm = "head"

    @classmethod
    def from_gguf(cls, keys: GGUFKeys) -> ModelConfig:
        """The shape that a GGUF file describes."""
        return keys.decoder()

    @classmethod
    def from_hf(cls, fields: HFFields) -> ModelConfig:
        """The shape that a config.json describes."""
        refuse_sliding_window(fields)
        return fields.decoder(attention_bias=fields.flag("attention_bias", default=False))
