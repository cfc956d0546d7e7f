"""Gemma 3 (Gemma Team 2025, arXiv:2503.19786), text: Gemma 2 with normed queries and keys, five windows to one."""

from __future__ import annotations

from octavo.core.model_config import ModelConfig, RopeTable
from octavo.model.architectures.gemma2 import GEMMA_NAMES, Gemma2, GemmaConfig, check_gemma, soft_cap
from octavo.model.architectures.llama import QK_NORMS, by_layer
from octavo.model.gguf_keys import GGUFKeys
from octavo.model.hf_fields import HFFields
from octavo.model.tensor_names import TensorNames

#: What the config.json of the models that read images leaves out.
_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
}


class Gemma3(Gemma2):
    """Layers with a window rotate by a table of their own, which is not stretched."""

    names = TensorNames({**GEMMA_NAMES, **QK_NORMS})
    qk_norm = "head"
    layers_of_27b = 62
    window_step = 6

    @classmethod
    def from_gguf(cls, keys: GGUFKeys) -> ModelConfig:
        """The shape that a GGUF file describes."""
        key, layers = "attention.sliding_window", keys.num_layers()
        window = keys.whole(key, 1 << 24, low=0, default=0)
        sliding = keys.every(f"{key}_pattern", cls.window_step, layers) if window else (False,) * layers
        table = keys.rope()
        local = RopeTable(theta=keys.real("rope.freq_base_swa", default=10_000.0), dim=table.dim)
        cap = "final_logit_softcapping"
        return keys.decoder(
            GemmaConfig,
            also_known={key, f"{key}_pattern", cap, "rope.freq_base_swa"},
            attention_scale=cls.scale_in_gguf(keys),
            layer_windows=by_layer(sliding, window, None),
            layer_ropes=by_layer(sliding, local, table),
            logits_soft_cap=keys.real(cap) if keys.values.get(cap) else None,
            hidden_act="gelu",
        )

    @classmethod
    def from_hf(cls, fields: HFFields) -> ModelConfig:
        """The shape that a config.json describes."""
        fields = fields.with_defaults(_DEFAULTS)
        check_gemma(fields)
        step = fields.whole("sliding_window_pattern", 1 << 12, default=cls.window_step)
        sliding, window = fields.sliding_layers(lambda i: (i + 1) % step != 0), fields.window()
        table = fields.rope("full_attention", default_theta=1_000_000.0)
        local = fields.local_rope("rope_local_base_freq", 10_000.0)
        return fields.decoder(
            GemmaConfig,
            activation="hidden_activation",
            hidden_act="gelu",
            rope=table,
            attention_scale=fields.real("query_pre_attn_scalar", default=256.0) ** -0.5,
            layer_windows=by_layer(sliding, window, None),
            layer_ropes=by_layer(sliding, local, table),
            attention_soft_cap=soft_cap(fields, "attn_logit_softcapping"),
            logits_soft_cap=soft_cap(fields, "final_logit_softcapping"),
            tied_embeddings=fields.flag("tie_word_embeddings", default=True),
            attention_bias=fields.flag("attention_bias", default=False),
        )
