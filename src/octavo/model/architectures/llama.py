"""Llama (Touvron et al. 2023, arXiv:2302.13971) and what is built like it: SmolLM2, TinyLlama, Llama 3."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.core.model_config import ModelConfig
from octavo.kernels.base import Array, Ops, Weight
from octavo.model.layers import Attention, GatedMLP, TensorSpec, bias, embedding, linear, norm


class Llama:
    """Pre-norm decoder: GQA with RoPE, RMSNorm, SwiGLU, tied or untied head, biases where the config says so."""

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

    @staticmethod
    def tensors(config: ModelConfig) -> dict[str, TensorSpec]:
        """Every tensor of the model: canonical name -> shape and uses."""
        c = config
        q_dim, kv_dim = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        specs = {"embedding.weight": embedding(c.vocab_size, c.hidden_size, head=c.tied_embeddings)}
        matrices = {
            "q": (q_dim, c.hidden_size, c.attention_bias),
            "k": (kv_dim, c.hidden_size, c.attention_bias),
            "v": (kv_dim, c.hidden_size, c.attention_bias),
            "o": (c.hidden_size, q_dim, c.attention_bias),
            "gate": (c.intermediate_size, c.hidden_size, c.mlp_bias),
            "up": (c.intermediate_size, c.hidden_size, c.mlp_bias),
            "down": (c.hidden_size, c.intermediate_size, c.mlp_bias),
        }
        for i in range(c.num_layers):
            specs[f"layers.{i}.attention_norm.weight"] = norm(c.hidden_size)
            specs[f"layers.{i}.mlp_norm.weight"] = norm(c.hidden_size)
            for name, (rows, columns, has_bias) in matrices.items():
                specs[f"layers.{i}.{name}.weight"] = linear(rows, columns)
                if has_bias:
                    specs[f"layers.{i}.{name}.bias"] = bias(rows)
        specs["final_norm.weight"] = norm(c.hidden_size)
        if not c.tied_embeddings:
            specs["head.weight"] = linear(c.vocab_size, c.hidden_size)
        return specs

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
