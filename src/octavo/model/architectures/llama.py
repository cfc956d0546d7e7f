"""Llama (Touvron et al. 2023, arXiv:2302.13971) and what is built like it: SmolLM2, TinyLlama, Llama 3."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.core.model_config import ModelConfig
from octavo.kernels.base import Array, Ops, Weight
from octavo.model.gguf_keys import GGUFKeys
from octavo.model.hf_fields import HFFields
from octavo.model.layers import Attention, GatedMLP, TensorSpec, bias, embedding, head, linear, norm
from octavo.model.tensor_names import TensorNames


class Llama:
    """Pre-norm decoder: GQA with RoPE, RMSNorm, SwiGLU, tied or untied head, biases where the config says so."""

    names = TensorNames(
        {
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
    )
    interleaved = frozenset({"q", "k"})

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
        """The linear layers of a block that have a bias."""
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
        for i in range(c.num_layers):
            specs[f"layers.{i}.attention_norm.weight"] = norm(c.hidden_size)
            specs[f"layers.{i}.mlp_norm.weight"] = norm(c.hidden_size)
            for name, (rows, columns) in matrices.items():
                specs[f"layers.{i}.{name}.weight"] = linear(rows, columns)
                if name in biased:
                    specs[f"layers.{i}.{name}.bias"] = bias(rows)
        specs["final_norm.weight"] = norm(c.hidden_size)
        if not c.tied_embeddings:
            specs["head.weight"] = head(c.vocab_size, c.hidden_size)
        return specs

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight]) -> None:
        self.config = config
        self.embedding = weights["embedding.weight"]
        self.layers = [
            (
                weights[f"layers.{i}.attention_norm.weight"],
                Attention(config, i, weights),
                weights[f"layers.{i}.mlp_norm.weight"],
                GatedMLP(config, i, weights),
            )
            for i in range(config.num_layers)
        ]
        self.final_norm = weights["final_norm.weight"]
        self.output = self.embedding if config.tied_embeddings else weights["head.weight"]

    def hidden(self, ops: Ops) -> Array:
        """The whole pass up to the final norm, for the logit rows only: [R, hidden]."""
        eps = self.config.rms_norm_eps
        x = ops.embedding(self.embedding, ops.token_ids)
        for attention_norm, attention, mlp_norm, mlp in self.layers:
            x = ops.add(x, attention(ops, ops.rms_norm(x, attention_norm, eps)))
            x = ops.add(x, mlp(ops, ops.rms_norm(x, mlp_norm, eps)))
        return ops.rms_norm(ops.select_logit_rows(x), self.final_norm, eps)

    def head(self, ops: Ops, rows: Array) -> Array:
        """Logits of some of those rows: [r, hidden] -> [r, vocab]."""
        return ops.logits(rows, self.output, self.config.logits_soft_cap)
