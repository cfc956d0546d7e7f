"""SmolLM3 (Hugging Face 2025): Llama that does not rotate in every fourth layer (NoPE: arXiv:2501.18795)."""

from __future__ import annotations

from octavo.core.model_config import ModelConfig
from octavo.model.architectures.llama import Llama
from octavo.model.architectures.qwen2 import refuse_sliding_window
from octavo.model.gguf_keys import GGUFKeys
from octavo.model.hf_fields import HFFields

_STEP = 4  # GGUF files do not say it


class SmolLM3(Llama):
    """Its GGUF files interleave Q and K as Llama's do, in layers that are not rotated too."""

    @classmethod
    def from_gguf(cls, keys: GGUFKeys) -> ModelConfig:
        """The shape that a GGUF file describes."""
        table = keys.rope()
        ropes = tuple(table if (i + 1) % _STEP else None for i in range(keys.num_layers()))
        return keys.decoder(also_known={"tensor_data_layout"}, layer_ropes=ropes)

    @classmethod
    def from_hf(cls, fields: HFFields) -> ModelConfig:
        """The shape that a config.json describes."""
        refuse_sliding_window(fields)
        table, layers = fields.rope(default_theta=2_000_000.0), fields.num_layers()
        rotated = fields.values.get("no_rope_layers")
        if rotated is None:
            step = fields.whole("no_rope_layer_interval", 1 << 12, default=_STEP)
            rotated = [int((i + 1) % step != 0) for i in range(layers)]
        if not isinstance(rotated, list) or len(rotated) != layers or any(x not in (0, 1) for x in rotated):
            fields.fail(f"no_rope_layers must be a list of {layers} times 0 or 1")
        return fields.decoder(
            rope=table,
            layer_ropes=tuple(table if x else None for x in rotated),
            attention_bias=fields.flag("attention_bias", default=False),
            mlp_bias=fields.flag("mlp_bias", default=False),
            tied_embeddings=fields.flag("tie_word_embeddings", default=True),
        )
