"""Command R7B and Command A (Cohere 2025, arXiv:2504.00698): attention and MLP side by side, scaled logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.core.model_config import ModelConfig
from octavo.kernels.base import Array, Ops, Weight
from octavo.model.architectures.llama import NAMES, Block, Llama, by_layer
from octavo.model.gguf_keys import GGUFKeys
from octavo.model.hf_fields import HFFields
from octavo.model.tensor_names import TensorNames


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereConfig(ModelConfig):
    """Llama's, and what logits are multiplied by."""

    logits_scale: float


class Cohere2(Llama):
    """One layer norm for both; three layers of four look through a window, and only these rotate."""

    names = TensorNames({name: files for name, files in NAMES.items() if name != "layers.{i}.mlp_norm"})
    interleaved_in_hf = frozenset({"q", "k"})
    norms = ("attention_norm",)
    centred = True

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight]) -> None:
        assert isinstance(config, CohereConfig)
        self.logits_scale = config.logits_scale
        super().__init__(config, weights)

    @classmethod
    def from_gguf(cls, keys: GGUFKeys) -> ModelConfig:
        """The shape that a GGUF file describes."""
        key, table = "attention.sliding_window", keys.rope()
        window = keys.whole(key, 1 << 24)
        sliding = keys.every(f"{key}_pattern", 4, keys.num_layers())
        return keys.decoder(
            CohereConfig,
            centred=True,
            also_known={key, f"{key}_pattern", "logit_scale"},
            logits_scale=keys.real("logit_scale"),
            layer_windows=by_layer(sliding, window, None),
            layer_ropes=by_layer(sliding, table, None),
        )

    @classmethod
    def from_hf(cls, fields: HFFields) -> ModelConfig:
        """The shape that a config.json describes."""
        step = fields.whole("sliding_window_pattern", 1 << 12, default=4)
        sliding, window = fields.sliding_layers(lambda i: (i + 1) % step != 0), fields.window()
        table = fields.rope()
        return fields.decoder(
            CohereConfig,
            eps="layer_norm_eps",
            default_eps=1e-5,
            logits_scale=fields.real("logit_scale", default=0.0625),
            layer_windows=by_layer(sliding, window, None),
            layer_ropes=by_layer(sliding, table, None),
            attention_bias=fields.flag("attention_bias", default=False),
            tied_embeddings=fields.flag("tie_word_embeddings", default=True),
        )

    def layer(self, ops: Ops, x: Array, block: Block) -> Array:
        """One layer: both parts read the same normed rows."""
        normed = block.norms["attention_norm"](ops, x)
        return ops.add(ops.add(x, block.attention(ops, normed)), block.mlp(ops, normed))
