"""Pieces that decoders share: what their tensors are, and layers as pure calls of ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast, get_args

from octavo.core.errors import ModelFileError
from octavo.core.model_config import ModelConfig
from octavo.kernels.base import Activation, Array, Ops, Weight, WeightUse


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape that a tensor must have, and what ops will do with it."""

    shape: tuple[int, ...]
    uses: frozenset[WeightUse]


def linear(rows: int, columns: int) -> TensorSpec:
    """A matrix [rows (N), columns (K)] of a linear layer."""
    return TensorSpec((rows, columns), frozenset({"linear"}))


def bias(size: int) -> TensorSpec:
    """A vector added to a linear layer's output."""
    return TensorSpec((size,), frozenset({"bias"}))


def norm(size: int) -> TensorSpec:
    """A vector of norm gains."""
    return TensorSpec((size,), frozenset({"norm"}))


def embedding(vocab_size: int, hidden_size: int, *, head: bool) -> TensorSpec:
    """The token table [vocab, hidden]; ``head``: it is also the matrix of the logits (tied embeddings)."""
    return TensorSpec((vocab_size, hidden_size), frozenset({"embedding", "head"} if head else {"embedding"}))


def head(vocab_size: int, hidden_size: int) -> TensorSpec:
    """The matrix of the logits [vocab, hidden], where it is none of the embedding's."""
    return TensorSpec((vocab_size, hidden_size), frozenset({"head"}))


@dataclass(frozen=True, slots=True)
class Linear:
    """A packed matrix [N, K] with its optional bias [N]."""

    weight: Weight
    bias: Weight | None

    @classmethod
    def named(cls, weights: Mapping[str, Weight], name: str) -> Linear:
        """The matrix ``{name}.weight`` and, where there is one, ``{name}.bias``."""
        return cls(weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, K] -> [T, N]."""
        return ops.linear(x, self.weight, self.bias)


class Attention:
    """Causal self-attention over the paged cache, with shared KV heads (GQA: Ainslie et al. 2023, arXiv:2305.13245)."""

    def __init__(self, config: ModelConfig, layer: int, weights: Mapping[str, Weight]) -> None:
        self.config, self.layer = config, layer
        self.q, self.k, self.v, self.o = (Linear.named(weights, f"layers.{layer}.{part}") for part in "qkvo")

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, hidden] -> [T, hidden]; writes this layer's K and V of the step's tokens on the way."""
        config, table = self.config, self.config.ropes[self.layer]
        q, k = self.q(ops, x), self.k(ops, x)
        if table is not None:
            q = ops.rope(q, ops.positions, config.num_heads, table)
            k = ops.rope(k, ops.positions, config.num_kv_heads, table)
        ops.write_kv(self.layer, k, self.v(ops, x))
        attended = ops.paged_attention(
            self.layer,
            q,
            scale=config.head_dim**-0.5,
            window=config.windows[self.layer],
            soft_cap=config.attention_soft_cap,
        )
        return self.o(ops, attended)


class GatedMLP:
    """down(activation(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, layer: int, weights: Mapping[str, Weight]) -> None:
        if config.hidden_act not in get_args(Activation):
            raise ModelFileError(
                f"activation {config.hidden_act!r} is not supported; octavo knows {', '.join(get_args(Activation))}"
            )
        self.activation = cast(Activation, config.hidden_act)
        self.gate, self.up, self.down = (
            Linear.named(weights, f"layers.{layer}.{part}") for part in ("gate", "up", "down")
        )

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, hidden] -> [T, hidden]."""
        return self.down(ops, ops.gated_mul(self.gate(ops, x), self.up(ops, x), self.activation))
