"""Pieces that decoders share: what their tensors are, and layers as pure calls of ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast, get_args

from octavo.core.errors import ModelFileError
from octavo.core.model_config import ModelConfig
from octavo.kernels.base import Activation, Array, Ops, PositionScale, Weight, WeightUse


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


@dataclass(frozen=True, slots=True)
class Norm:
    """Gains of a norm over rows, with a bias or not; ``centred``: a layer norm, else an RMS norm."""

    weight: Weight
    bias: Weight | None
    eps: float
    centred: bool

    @classmethod
    def named(cls, weights: Mapping[str, Weight], name: str, eps: float, *, centred: bool = False) -> Norm:
        """The gains ``{name}.weight`` and, where there is one, ``{name}.bias``."""
        return cls(weights[f"{name}.weight"], weights.get(f"{name}.bias"), eps, centred)

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, hidden] -> [T, hidden]."""
        if self.centred:
            return ops.layer_norm(x, self.weight, self.bias, self.eps)
        return ops.rms_norm(x, self.weight, self.eps)


class Attention:
    """Causal self-attention over the paged cache, with shared KV heads (GQA: Ainslie et al. 2023, arXiv:2305.13245).

    Queries and keys are normed before they are rotated if the weights have gains for that.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: Mapping[str, Weight],
        *,
        scale: float | None = None,
        norm_heads: bool = False,
        growth: PositionScale | None = None,
    ) -> None:
        """scale: of scores; None: 1 / sqrt(head_dim). norm_heads: a norm takes each head by itself, else the row."""
        self.config, self.layer, self.growth, self.norm_heads = config, layer, growth, norm_heads
        self.scale = config.head_dim**-0.5 if scale is None else scale
        self.q, self.k, self.v, self.o = (Linear.named(weights, f"layers.{layer}.{part}") for part in "qkvo")
        self.q_norm, self.k_norm = (weights.get(f"layers.{layer}.{part}_norm.weight") for part in "qk")
        self.window, self.table = config.windows[layer], config.ropes[layer]

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, hidden] -> [T, hidden]; writes this layer's K and V of the step's tokens on the way."""
        config = self.config
        q = self._placed(ops, self.q(ops, x), self.q_norm, config.num_heads)
        k = self._placed(ops, self.k(ops, x), self.k_norm, config.num_kv_heads)
        if self.growth is not None:
            q = ops.scale_by_position(q, ops.positions, self.growth)
        ops.write_kv(self.layer, k, self.v(ops, x))
        soft_cap = config.attention_soft_cap
        attended = ops.paged_attention(self.layer, q, scale=self.scale, window=self.window, soft_cap=soft_cap)
        return self.o(ops, attended)

    def _placed(self, ops: Ops, x: Array, gains: Weight | None, num_heads: int) -> Array:
        """Queries or keys, normed and rotated."""
        if gains is not None:
            x = ops.rms_norm(x, gains, self.config.rms_norm_eps, num_heads if self.norm_heads else 1)
        return x if self.table is None else ops.rope(x, ops.positions, num_heads, self.table)


class GatedMLP:
    """down(activation(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, layer: int, weights: Mapping[str, Weight]) -> None:
        self.activation = known_activation(config)
        self.gate, self.up, self.down = (
            Linear.named(weights, f"layers.{layer}.{part}") for part in ("gate", "up", "down")
        )

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, hidden] -> [T, hidden]."""
        return self.down(ops, ops.gated_mul(self.gate(ops, x), self.up(ops, x), self.activation))


class MLP:
    """down(activation(up(x))), without a gate."""

    def __init__(self, config: ModelConfig, layer: int, weights: Mapping[str, Weight]) -> None:
        self.activation = known_activation(config)
        self.up, self.down = (Linear.named(weights, f"layers.{layer}.{part}") for part in ("up", "down"))

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, hidden] -> [T, hidden]."""
        return self.down(ops, ops.activation(self.up(ops, x), self.activation))


def known_activation(config: ModelConfig) -> Activation:
    """The config's, if ops have it."""
    if config.hidden_act not in get_args(Activation):
        raise ModelFileError(
            f"activation {config.hidden_act!r} is not supported; octavo knows {', '.join(get_args(Activation))}"
        )
    return cast(Activation, config.hidden_act)
