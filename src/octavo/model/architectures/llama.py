"""Llama (Touvron et al. 2023, arXiv:2302.13971) and what is built like it: SmolLM2, TinyLlama, Llama 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

from octavo.core.model_config import ModelConfig
from octavo.kernels.base import Array, Ops, PositionScale, Weight
from octavo.model.gguf_keys import GGUFKeys
from octavo.model.hf_fields import HFFields
from octavo.model.layers import MLP, Attention, GatedMLP, Norm, TensorSpec, bias, embedding, head, linear, norm
from octavo.model.tensor_names import TensorNames

T = TypeVar("T")
#: Over what queries and keys are normed before they are rotated.
QKNorm = Literal["none", "head", "row"]
#: canonical name -> (GGUF's, Hugging Face's): what most decoders call their tensors
NAMES = {
    "embedding": ("token_embd", "model.embed_tokens"),
    "layers.{i}.attention_norm": ("blk.{i}.attn_norm", "model.layers.{i}.input_layernorm"),
    "layers.{i}.q": ("blk.{i}.attn_q", "model.layers.{i}.self_attn.q_proj"),
    "layers.{i}.k": ("blk.{i}.attn_k", "model.layers.{i}.self_attn.k_proj"),
    "layers.{i}.v": ("blk.{i}.attn_v", "model.layers.{i}.self_attn.v_proj"),
    "layers.{i}.o": ("blk.{i}.attn_output", "model.layers.{i}.self_attn.o_proj"),
    "layers.{i}.mlp_norm": ("blk.{i}.ffn_norm", "model.layers.{i}.post_attention_layernorm"),
    "layers.{i}.gate": ("blk.{i}.ffn_gate", "model.layers.{i}.mlp.gate_proj"),
    "layers.{i}.up": ("blk.{i}.ffn_up", "model.layers.{i}.mlp.up_proj"),
    "layers.{i}.down": ("blk.{i}.ffn_down", "model.layers.{i}.mlp.down_proj"),
    "final_norm": ("output_norm", "model.norm"),
    "head": ("output", "lm_head"),
}
#: The same of gains for queries and keys.
QK_NORMS = {
    "layers.{i}.q_norm": ("blk.{i}.attn_q_norm", "model.layers.{i}.self_attn.q_norm"),
    "layers.{i}.k_norm": ("blk.{i}.attn_k_norm", "model.layers.{i}.self_attn.k_norm"),
}


class Block:
    """The weights of one layer. Norms by the names that the architecture gives them."""

    def __init__(self, model: Llama, layer: int, weights: Mapping[str, Weight]) -> None:
        config = model.config
        self.attention = Attention(
            config,
            layer,
            weights,
            scale=model.attention_scale,
            norm_heads=model.qk_norm == "head",
            growth=model.growth,
        )
        self.mlp = (GatedMLP if model.gated else MLP)(config, layer, weights)
        self.norms = {
            name: Norm.named(weights, f"layers.{layer}.{name}", config.rms_norm_eps, centred=model.centred)
            for name in model.norms
        }


class Llama:
    """Pre-norm decoder: GQA with RoPE, RMSNorm, SwiGLU, tied or untied head, biases where the config says so.

    The base of those that are built like it. They say in attributes what differs.
    """

    names = TensorNames(NAMES)
    interleaved = frozenset({"q", "k"})
    interleaved_in_hf: frozenset[str] = frozenset()
    fused: Mapping[str, tuple[str, ...]] = {}
    fused_by_head = False
    unit_offset = False
    norms: tuple[str, ...] = ("attention_norm", "mlp_norm")
    qk_norm: QKNorm = "none"
    centred = False  # layer norms
    gated = True  # a gate in the MLP
    embedding_scale = residual_scale = logits_scale = 1.0
    attention_scale: float | None = None  # 1 / sqrt(head_dim)
    growth: PositionScale | None = None

    @classmethod
    def from_gguf(cls, keys: GGUFKeys) -> ModelConfig:
        """The shape that a GGUF file describes."""
        return keys.decoder(
            also_known={"tensor_data_layout"},
            attention_bias=keys.has_tensor("blk.0.attn_q.bias"),
            mlp_bias=keys.has_tensor("blk.0.ffn_down.bias"),
        )

    @classmethod
    def from_hf(cls, fields: HFFields) -> ModelConfig:
        """The shape that a config.json describes."""
        return fields.decoder(
            attention_bias=fields.flag("attention_bias", default=False),
            mlp_bias=fields.flag("mlp_bias", default=False),
        )

    @classmethod
    def biased(cls, config: ModelConfig) -> frozenset[str]:
        """The linear layers of a block, and its norms, that have a bias."""
        return frozenset("qkvo" if config.attention_bias else ()) | (
            {"gate", "up", "down"} if config.mlp_bias else frozenset()
        )

    @classmethod
    def tensors(cls, config: ModelConfig) -> dict[str, TensorSpec]:
        """Every tensor of the model: canonical name -> shape and uses."""
        c, biased = config, cls.biased(config)
        q_dim, kv_dim = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        specs = {"embedding.weight": embedding(c.vocab_size, c.hidden_size, head=c.tied_embeddings)}
        matrices = {
            "q": (q_dim, c.hidden_size),
            "k": (kv_dim, c.hidden_size),
            "v": (kv_dim, c.hidden_size),
            "o": (c.hidden_size, q_dim),
            "gate": (c.intermediate_size, c.hidden_size),
            "up": (c.intermediate_size, c.hidden_size),
            "down": (c.hidden_size, c.intermediate_size),
        }
        if not cls.gated:
            del matrices["gate"]
        gains = dict.fromkeys(cls.norms, c.hidden_size)
        if cls.qk_norm != "none":
            gains |= dict(zip(("q_norm", "k_norm"), (q_dim, kv_dim), strict=True))
        if cls.qk_norm == "head":
            gains |= dict.fromkeys(("q_norm", "k_norm"), c.head_dim)
        for i in range(c.num_layers):
            for name, size in gains.items():
                specs[f"layers.{i}.{name}.weight"] = norm(size)
                if name in biased:
                    specs[f"layers.{i}.{name}.bias"] = bias(size)
            for name, (rows, columns) in matrices.items():
                specs[f"layers.{i}.{name}.weight"] = linear(rows, columns)
                if name in biased:
                    specs[f"layers.{i}.{name}.bias"] = bias(rows)
        specs["final_norm.weight"] = norm(c.hidden_size)
        if "final_norm" in biased:
            specs["final_norm.bias"] = bias(c.hidden_size)
        if not c.tied_embeddings:
            specs["head.weight"] = head(c.vocab_size, c.hidden_size)
        return specs

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight]) -> None:
        self.config = config
        self.embedding = weights["embedding.weight"]
        self.blocks = [Block(self, i, weights) for i in range(config.num_layers)]
        self.final_norm = Norm.named(weights, "final_norm", config.rms_norm_eps, centred=self.centred)
        self.output = self.embedding if config.tied_embeddings else weights["head.weight"]

    def hidden(self, ops: Ops) -> Array:
        """The whole pass up to the final norm, for the logit rows only: [R, hidden]."""
        x = scaled(ops, ops.embedding(self.embedding, ops.token_ids), self.embedding_scale)
        for block in self.blocks:
            x = self.layer(ops, x, block)
        return self.final_norm(ops, ops.select_logit_rows(x))

    def layer(self, ops: Ops, x: Array, block: Block) -> Array:
        """One layer, x [T, hidden] -> [T, hidden]: the rows are normed before attention and before the MLP."""
        attended = block.attention(ops, block.norms["attention_norm"](ops, x))
        x = ops.add(x, scaled(ops, attended, self.residual_scale))
        widened = block.mlp(ops, block.norms["mlp_norm"](ops, x))
        return ops.add(x, scaled(ops, widened, self.residual_scale))

    def head(self, ops: Ops, rows: Array) -> Array:
        """Logits of some of those rows: [r, hidden] -> [r, vocab]."""
        return ops.logits(scaled(ops, rows, self.logits_scale), self.output, self.config.logits_soft_cap)


class SandwichNorm(Llama):
    """Norms before attention and MLP, and after each again (Ding et al. 2021, arXiv:2105.13290)."""

    norms = ("attention_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm")

    def layer(self, ops: Ops, x: Array, block: Block) -> Array:
        """One layer: rows are normed before attention and MLP, and their results again."""
        norms = block.norms
        attended = block.attention(ops, norms["attention_norm"](ops, x))
        x = ops.add(x, norms["post_attention_norm"](ops, attended))
        widened = block.mlp(ops, norms["mlp_norm"](ops, x))
        return ops.add(x, norms["post_mlp_norm"](ops, widened))


def scaled(ops: Ops, x: Array, factor: float) -> Array:
    """x * factor, without an op where the factor is 1."""
    return x if factor == 1.0 else ops.scale(x, factor)


def by_layer(flags: Sequence[bool], yes: T, no: T) -> tuple[T, ...]:
    """Of each layer: ``yes`` or ``no``, as its flag says."""
    return tuple(yes if flag else no for flag in flags)
