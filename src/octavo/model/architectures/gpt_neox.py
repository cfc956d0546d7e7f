"""GPT-NeoX (Black et al. 2022, arXiv:2204.06745) and Pythia: attention and MLP side by side, each with its norm."""

from __future__ import annotations

from octavo.core.model_config import ModelConfig
from octavo.kernels.base import Array, Ops
from octavo.model.architectures.llama import Block, Llama
from octavo.model.gguf_keys import GGUFKeys
from octavo.model.hf_fields import HFFields
from octavo.model.tensor_names import TensorNames

_LAYER = "gpt_neox.layers.{i}"


class GPTNeoX(Llama):
    """Safetensors have queries, keys and values of one head after the other; GGUF has all queries first."""

    names = TensorNames(
        {
            "embedding": ("token_embd", "gpt_neox.embed_in"),
            "layers.{i}.attention_norm": ("blk.{i}.attn_norm", f"{_LAYER}.input_layernorm"),
            "layers.{i}.qkv": ("blk.{i}.attn_qkv", f"{_LAYER}.attention.query_key_value"),
            "layers.{i}.o": ("blk.{i}.attn_output", f"{_LAYER}.attention.dense"),
            "layers.{i}.mlp_norm": ("blk.{i}.ffn_norm", f"{_LAYER}.post_attention_layernorm"),
            "layers.{i}.up": ("blk.{i}.ffn_up", f"{_LAYER}.mlp.dense_h_to_4h"),
            "layers.{i}.down": ("blk.{i}.ffn_down", f"{_LAYER}.mlp.dense_4h_to_h"),
            "final_norm": ("output_norm", "gpt_neox.final_layer_norm"),
            "head": ("output", "embed_out"),
        }
    )
    interleaved = frozenset()
    fused = {"qkv": ("q", "k", "v")}  # noqa: RUF012
    fused_by_head = True
    centred = True
    gated = False

    @classmethod
    def from_gguf(cls, keys: GGUFKeys) -> ModelConfig:
        """The shape that a GGUF file describes."""
        if not keys.flag("use_parallel_residual", default=True):
            keys.fail("use_parallel_residual is off, which is not supported")
        return keys.decoder(
            centred=True,
            also_known={"use_parallel_residual"},
            hidden_act="gelu_erf",
            attention_bias=keys.has_tensor("blk.0.attn_qkv.bias"),
            mlp_bias=True,
        )

    @classmethod
    def from_hf(cls, fields: HFFields) -> ModelConfig:
        """The shape that a config.json describes."""
        if not fields.flag("use_parallel_residual", default=True):
            fields.fail("use_parallel_residual is off, which is not supported")
        share = fields.real("rotary_pct", 1.0, default=0.25)
        theta = fields.real("rotary_emb_base", default=10_000.0)
        return fields.decoder(
            eps="layer_norm_eps",
            default_eps=1e-5,
            default_activation="gelu",
            rope=fields.rope(default_share=share, default_theta=theta),
            attention_bias=fields.flag("attention_bias", default=True),
            mlp_bias=True,
        )

    @classmethod
    def biased(cls, config: ModelConfig) -> frozenset[str]:
        """Norms always, the linear layers where the config says so."""
        return super().biased(config) | {*cls.norms, "final_norm"}

    def layer(self, ops: Ops, x: Array, block: Block) -> Array:
        """One layer: both parts read what comes in."""
        attended = block.attention(ops, block.norms["attention_norm"](ops, x))
        widened = block.mlp(ops, block.norms["mlp_norm"](ops, x))
        return ops.add(ops.add(x, attended), widened)
