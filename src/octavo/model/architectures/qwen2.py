"""Qwen2 (Yang et al. 2024, arXiv:2407.10671) and Qwen2.5: Llama with biases on queries, keys and values."""

from __future__ import annotations

from octavo.core.model_config import ModelConfig
from octavo.model.architectures.llama import Llama
from octavo.model.gguf_keys import GGUFKeys
from octavo.model.hf_fields import HFFields


class Qwen2(Llama):
    """Its GGUF files keep Q and K in the order in which they are trained."""

    interleaved = frozenset()

    @classmethod
    def from_gguf(cls, keys: GGUFKeys) -> ModelConfig:
        """The shape that a GGUF file describes."""
        return keys.decoder(attention_bias=True)

    @classmethod
    def from_hf(cls, fields: HFFields) -> ModelConfig:
        """The shape that a config.json describes. ``sliding_window`` alone means nothing: it is off in most of them."""
        refuse_sliding_window(fields)
        return fields.decoder(attention_bias=True)

    @classmethod
    def biased(cls, config: ModelConfig) -> frozenset[str]:
        """The linear layers of a block that have a bias."""
        return frozenset("qkv")


def refuse_sliding_window(fields: HFFields) -> None:
    """Raise ``ModelFileError`` if the window is on: which layers have it, files of this family do not say alike."""
    if fields.flag("use_sliding_window", default=False):
        fields.fail("use_sliding_window is on, which is not supported: some layers would see less than all")
