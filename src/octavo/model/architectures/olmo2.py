"""OLMo 2 (OLMo Team 2025, arXiv:2501.00656) and OLMo 3: norms after attention and MLP, and over queries and keys."""

from __future__ import annotations

from octavo.core.model_config import ModelConfig
from octavo.kernels.base import Array, Ops
from octavo.model.architectures.llama import NAMES, QK_NORMS, Block, Llama, QKNorm, by_layer
from octavo.model.gguf_keys import GGUFKeys
from octavo.model.hf_fields import HFFields
from octavo.model.tensor_names import TensorNames

_NORMS_BEFORE = {"layers.{i}.attention_norm", "layers.{i}.mlp_norm"}
POST_NORM_NAMES = {
    **{name: files for name, files in NAMES.items() if name not in _NORMS_BEFORE},
    **QK_NORMS,
    "layers.{i}.post_attention_norm": ("blk.{i}.post_attention_norm", "model.layers.{i}.post_attention_layernorm"),
    "layers.{i}.post_mlp_norm": ("blk.{i}.post_ffw_norm", "model.layers.{i}.post_feedforward_layernorm"),
}


class Olmo2(Llama):
    """Queries and keys are normed over all heads together."""

    names = TensorNames(POST_NORM_NAMES)
    interleaved = frozenset()
    norms = ("post_attention_norm", "post_mlp_norm")
    qk_norm: QKNorm = "row"

    @classmethod
    def from_gguf(cls, keys: GGUFKeys) -> ModelConfig:
        """The shape that a GGUF file describes; one with a window is an OLMo 3, whose windows are not stretched."""
        key, layers, table = "attention.sliding_window", keys.num_layers(), keys.rope()
        window = keys.whole(key, 1 << 24, low=0, default=0)
        sliding = keys.every(f"{key}_pattern", 4, layers) if window else (False,) * layers
        local = keys.rope(scaling=None)
        return keys.decoder(
            also_known={key, f"{key}_pattern"},
            layer_windows=by_layer(sliding, window, None),
            layer_ropes=by_layer(sliding, local, table),
        )

    @classmethod
    def from_hf(cls, fields: HFFields) -> ModelConfig:
        """The shape that a config.json describes."""
        return fields.decoder(default_eps=1e-5, attention_bias=fields.flag("attention_bias", default=False))

    def layer(self, ops: Ops, x: Array, block: Block) -> Array:
        """One layer: the results of attention and MLP are normed, not what goes in."""
        x = ops.add(x, block.norms["post_attention_norm"](ops, block.attention(ops, x)))
        return ops.add(x, block.norms["post_mlp_norm"](ops, block.mlp(ops, x)))


class Olmo3(Olmo2):
    """Three layers of four look through a window and rotate without scaling."""

    @classmethod
    def from_hf(cls, fields: HFFields) -> ModelConfig:
        """The shape that a config.json describes."""
        sliding, window = fields.sliding_layers(lambda i: (i + 1) % 4 != 0), fields.window()
        table = fields.rope("full_attention", default_theta=500_000.0)
        local = fields.local_rope("rope_theta", 500_000.0)
        return fields.decoder(
            default_eps=1e-5,
            rope=table,
            layer_windows=by_layer(sliding, window, None),
            layer_ropes=by_layer(sliding, local, table),
            attention_bias=fields.flag("attention_bias", default=False),
        )
