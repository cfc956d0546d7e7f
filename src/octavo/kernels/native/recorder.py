"""Recording a model: ``Ops`` that compute nothing and note what was asked.

Each op hands out a ``Symbol``, a name for an array that will exist in every step. Symbols are written once, so nodes
may be reordered freely as long as inputs come first; ``fusion.py`` makes use of that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from octavo import _native
from octavo.core.errors import ConfigError
from octavo.core.model_config import RopeTable
from octavo.kernels.base import Activation, PositionScale, RoutingRule

Domain = Literal["tokens", "rows"]


@dataclass(frozen=True, slots=True)
class Symbol:
    """An activation array [T or R, width] float32 of every step to come."""

    index: int
    domain: Domain
    width: int


@dataclass(frozen=True, slots=True)
class StepInts:
    """One of the step's own integer arrays, which ops may only pass on."""

    name: Literal["token_ids", "positions"]


@dataclass(slots=True, eq=False)
class Node:
    """One op: what it reads, what it writes, and its constants."""

    op: str
    inputs: tuple[Symbol, ...]
    output: Symbol | None
    params: dict[str, Any] = field(default_factory=dict)


class Recorder:
    """Implements ``kernels.base.Ops`` by appending a ``Node`` per call.

    Shapes are checked here, once: a model that does not fit its weights fails at ``bind``, not inside a kernel.
    """

    def __init__(self, context: _native.Context, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self.token_ids, self.positions = StepInts("token_ids"), StepInts("positions")
        self.nodes: list[Node] = []
        self._context, self._num_symbols = context, 0
        self._q_width, self._kv_width = num_heads * head_dim, num_kv_heads * head_dim
        self._head_dim, self._group_width = head_dim, num_heads // num_kv_heads * head_dim

    def symbol(self, domain: Domain, width: int) -> Symbol:
        """A new array; outside of ops only for the input of the head."""
        self._num_symbols += 1
        return Symbol(self._num_symbols - 1, domain, width)

    def embedding(self, table: _native.PackedMatrix, token_ids: StepInts) -> Symbol:
        if token_ids != self.token_ids:
            raise ConfigError("embedding takes the step's token_ids")
        return self._add("embedding", (), "tokens", table.shape[1], table=table)

    def rms_norm(self, x: Symbol, weight: _native.Vector, eps: float, num_heads: int = 1) -> Symbol:
        _check_width("rms_norm's input", x.width, num_heads * weight.size)
        return self._add("rms_norm", (x,), x.domain, x.width, weight=weight, eps=eps, num_heads=num_heads)

    def layer_norm(self, x: Symbol, weight: _native.Vector, bias: _native.Vector | None, eps: float) -> Symbol:
        for vector in (weight, bias):
            _check_width("layer_norm's weight or bias", x.width if vector is None else vector.size, x.width)
        return self._add("layer_norm", (x,), x.domain, x.width, weight=weight, bias=bias, eps=eps)

    def linear(self, x: Symbol, weight: _native.PackedMatrix, bias: _native.Vector | None = None) -> Symbol:
        rows, columns = weight.shape
        _check_width("a linear layer's input", x.width, columns)
        if bias is not None:
            _check_width("a bias", bias.size, rows)
        reads_quantised = weight.reads_quantised(self._context)
        return self._add("linear", (x,), x.domain, rows, weight=weight, bias=bias, reads_quantised=reads_quantised)

    def rope(self, x: Symbol, positions: StepInts, num_heads: int, table: RopeTable) -> Symbol:
        self._check_positions("rope", x, positions)
        _check_width("rope's input", x.width, num_heads * self._head_dim)
        return self._add("rope", (x,), x.domain, x.width, num_heads=num_heads, table=table)

    def scale_by_position(self, x: Symbol, positions: StepInts, scale: PositionScale) -> Symbol:
        self._check_positions("scale_by_position", x, positions)
        return self._add("scale_by_position", (x,), x.domain, x.width, scale=scale)

    def write_kv(self, layer: int, k: Symbol, v: Symbol) -> None:
        for x in (k, v):
            _check_width("K or V", x.width, self._kv_width)
        self.nodes.append(Node("write_kv", (k, v), None, {"layer": layer}))

    def paged_attention(
        self, layer: int, q: Symbol, *, scale: float, window: int | None = None, soft_cap: float | None = None
    ) -> Symbol:
        _check_width("attention's queries", q.width, self._q_width)
        params = {"layer": layer, "scale": scale, "window": window or 0, "soft_cap": soft_cap or 0.0}
        return self._add("attention", (q,), q.domain, q.width, group_width=self._group_width, quantised=False, **params)

    def gated_mul(self, gate: Symbol, up: Symbol, activation: Activation) -> Symbol:
        _check_width("gated_mul's up", up.width, gate.width)
        return self._add("gated_mul", (gate, up), gate.domain, gate.width, activation=activation)

    def activation(self, x: Symbol, activation: Activation) -> Symbol:
        return self._add("activation", (x,), x.domain, x.width, activation=activation)

    def add(self, a: Symbol, b: Symbol) -> Symbol:
        _check_width("add's second array", b.width, a.width)
        return self._add("add", (a, b), a.domain, a.width)

    def scale(self, x: Symbol, factor: float) -> Symbol:
        return self._add("scale", (x,), x.domain, x.width, factor=factor)

    def select_logit_rows(self, x: Symbol) -> Symbol:
        if x.domain != "tokens":
            raise ConfigError("select_logit_rows takes an array with a row per token")
        return self._add("select_rows", (x,), "rows", x.width)

    def logits(self, x: Symbol, head: _native.PackedMatrix, soft_cap: float | None = None) -> Symbol:
        product = self.linear(x, head)
        return product if soft_cap is None else self._add("soft_cap", (product,), x.domain, product.width, cap=soft_cap)

    def route(self, logits: Symbol, rule: RoutingRule, correction: _native.Vector | None = None) -> NoReturn:
        _refuse("route")

    def expert_linear(self, x: Symbol, weight: Any, routing: Any, bias: Any = None) -> NoReturn:
        _refuse("expert_linear")

    def combine(self, x: Symbol, routing: Any) -> NoReturn:
        _refuse("combine")

    def adapter_linear(self, y: Symbol, x: Symbol, a: Any, b: Any, adapter_rows: Any) -> NoReturn:
        _refuse("adapter_linear")

    def _check_positions(self, op: str, x: Symbol, positions: StepInts) -> None:
        if positions != self.positions or x.domain != "tokens":
            raise ConfigError(f"{op} takes the step's positions and an array with a row per token")

    def _add(self, op: str, inputs: tuple[Symbol, ...], domain: Domain, width: int, **params: Any) -> Symbol:
        output = self.symbol(domain, width)
        self.nodes.append(Node(op, inputs, output, params))
        return output


def _refuse(op: str) -> NoReturn:
    raise ConfigError(f"the native backend does not have the op {op}, which this model needs; use --backend torch")


def _check_width(what: str, width: int, wanted: int) -> None:
    if width != wanted:
        raise ConfigError(f"{what} has {width} columns but must have {wanted}")
