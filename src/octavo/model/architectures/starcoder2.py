"""StarCoder2 (Lozhkov et al. 2024, arXiv:2402.19173): layer norms and biases, an MLP without a gate."""

from __future__ import annotations

from octavo.core.model_config import ModelConfig
from octavo.model.architectures.llama import NAMES, Llama
from octavo.model.gguf_keys import GGUFKeys
from octavo.model.hf_fields import HFFields
from octavo.model.tensor_names import TensorNames


class Starcoder2(Llama):
    """Its GGUF files keep Q and K in the order in which they are trained."""

    names = TensorNames(
        {
            **{name: files for name, files in NAMES.items() if name != "layers.{i}.gate"},
            "layers.{i}.up": ("blk.{i}.ffn_up", "model.layers.{i}.mlp.c_fc"),
            "layers.{i}.down": ("blk.{i}.ffn_down", "model.layers.{i}.mlp.c_proj"),
        }
    )
    interleaved = frozenset()
    centred = True
    gated = False

    @classmethod
    def from_gguf(cls, keys: GGUFKeys) -> ModelConfig:
        """The shape that a GGUF file describes."""
        has_bias, key = keys.has_tensor("blk.0.attn_q.bias"), "attention.sliding_window"
        return keys.decoder(
            centred=True,
            also_known={key},
            hidden_act="gelu",
            sliding_window=keys.whole(key, 1 << 24, low=0, default=0) or None,
            attention_bias=has_bias,
            mlp_bias=has_bias,
        )

    @classmethod
    def from_hf(cls, fields: HFFields) -> ModelConfig:
        """The shape that a config.json describes."""
        has_bias = fields.flag("use_bias", default=True)
        return fields.decoder(
            eps="norm_epsilon",
            default_eps=1e-5,
            default_activation="gelu_pytorch_tanh",
            sliding_window=fields.window(),
            attention_bias=has_bias,
            mlp_bias=has_bias,
            tied_embeddings=fields.flag("tie_word_embeddings", default=True),
        )

    @classmethod
    def biased(cls, config: ModelConfig) -> frozenset[str]:
        """Norms always, the linear layers where the config says so."""
        return super().biased(config) | {*cls.norms, "final_norm"}
