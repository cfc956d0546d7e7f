"""From fused items to a C++ program: assigns buffers, then emits one call per item."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo import _native
from octavo.core.model_config import ModelConfig, RopeTable
from octavo.kernels.base import Model
from octavo.kernels.native.fusion import Item, Part, Quantise, Region, fuse
from octavo.kernels.native.recorder import Domain, Node, Recorder, Symbol
from octavo.kernels.reference.rope import attention_factor, inverse_frequencies

RowOp = _native.RowOp
_DOMAINS = {"tokens": _native.Domain.TOKENS, "rows": _native.Domain.ROWS}
_GATES = {"silu": _native.Gate.SILU, "gelu": _native.Gate.GELU, "gelu_erf": _native.Gate.GELU_ERF}
_Key = tuple[Domain, int, bool]  # domain, width, quantised


class BufferPlan:
    """Buffers by liveness: one is given out again once its last reader has run.

    An op's output is placed before its inputs are freed, so no op writes what it reads.
    """

    def __init__(self, program: _native.Program) -> None:
        self._program = program
        self._free: dict[_Key, list[int]] = {}
        self._placed: dict[tuple[Symbol, bool], int] = {}
        self._pinned: set[Symbol] = set()

    def place(self, symbol: Symbol, quantised: bool = False) -> int:
        key = (symbol.domain, symbol.width, quantised)
        free = self._free.setdefault(key, [])
        index = free.pop() if free else self._program.buffer(_DOMAINS[symbol.domain], symbol.width, quantised)
        self._placed[symbol, quantised] = index
        return index

    def pin(self, symbol: Symbol) -> int:
        """A buffer of its own, never shared: the program lays it over slices of another one."""
        index = self._program.buffer(_DOMAINS[symbol.domain], symbol.width, False)
        self._placed[symbol, False] = index
        self._pinned.add(symbol)
        return index

    def of(self, symbol: Symbol, quantised: bool = False) -> int:
        return self._placed[symbol, quantised]

    def release(self, symbol: Symbol) -> None:
        """Its last reader has run."""
        if symbol in self._pinned:
            return
        for quantised in (False, True):
            index = self._placed.pop((symbol, quantised), None)
            if index is not None:
                self._free.setdefault((symbol.domain, symbol.width, quantised), []).append(index)


class ProgramBuilder:
    """Records a model and builds its program."""

    def __init__(self, context: _native.Context, config: ModelConfig, *, fused: bool = True) -> None:
        self._context, self._config, self._fused = context, config, fused
        self.program = _native.Program(
            context,
            config.vocab_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        self._buffers = BufferPlan(self.program)
        self._rotations: dict[RopeTable, int] = {}

    def build(self, model: Model, *, max_tokens: int, max_seqs: int) -> BuiltProgram:
        """Record hidden and head once. Raises ``ConfigError`` if the model's arrays do not fit each other."""
        c = self._config
        recorder = Recorder(self._context, c.num_heads, c.num_kv_heads, c.head_dim)
        hidden = model.hidden(recorder)
        items = fuse(recorder.nodes, hidden, enabled=self._fused)
        self._emit_section(_native.Section.BODY, items, hidden)
        hidden_buffer = self._buffers.of(hidden)
        recorder.nodes.clear()
        rows = recorder.symbol("rows", hidden.width)
        logits = model.head(recorder, rows)
        rows_buffer = self._buffers.pin(rows)
        self._emit_section(_native.Section.HEAD, fuse(recorder.nodes, logits, enabled=self._fused), logits)
        logits_buffer = self._buffers.of(logits)
        self.program.finish(hidden_buffer, rows_buffer, logits_buffer, max_tokens, max_seqs)
        return BuiltProgram(self.program, hidden_buffer, logits_buffer)

    def _emit_section(self, section: _native.Section, items: Sequence[Item], result: Symbol) -> None:
        last_use = {symbol: i for i, item in enumerate(items) for symbol in _reads(item)}
        for i, item in enumerate(items):
            if isinstance(item, Quantise):
                source = self._buffers.of(item.symbol)
                target = self._buffers.place(item.symbol, quantised=True)
                self.program.row_op(RowOp.QUANTISE, section, _DOMAINS[item.symbol.domain], a=source, out=target)
            elif isinstance(item, Region):
                parts = [self._part(part) for part in item.parts]
                self.program.linear(section, _DOMAINS[item.outputs[0].domain], parts)
            else:
                self._emit_node(section, item)
            for symbol in {*_reads(item), *_writes(item)}:
                if last_use.get(symbol, i) == i and symbol != result:
                    self._buffers.release(symbol)

    def _part(self, part: Part) -> dict[str, Any]:
        params = part.node.params
        call: dict[str, Any] = {
            "weight": params["weight"],
            "x": self._buffers.of(part.node.inputs[0], params["reads_quantised"]),
            "out": self._buffers.place(part.output) if part.floats else -1,
        }
        if params["bias"] is not None:
            call["bias"] = params["bias"]
        if part.up is not None:
            call |= {"up": part.up.params["weight"], "gate": _GATES[part.activation]}
        if part.residual is not None:
            call["residual"] = self._buffers.of(part.residual)
        if part.quantised:
            call["quantised_out"] = self._buffers.place(part.output, quantised=True)
        return call

    def _emit_node(self, section: _native.Section, node: Node) -> None:
        p, params = self.program, node.params
        inputs = [self._buffers.of(symbol) for symbol in node.inputs]
        if node.output is None:
            domain = _DOMAINS[node.inputs[0].domain]
            p.row_op(RowOp.WRITE_KV, section, domain, a=inputs[0], b=inputs[1], count=params["layer"])
            return
        out, domain = self._buffers.place(node.output), _DOMAINS[node.output.domain]
        match node.op:
            case "embedding":
                p.row_op(RowOp.EMBEDDING, section, domain, table=params["table"], out=out)
            case "rms_norm":
                weight, eps, heads = params["weight"], params["eps"], params["num_heads"]
                p.row_op(RowOp.RMS_NORM, section, domain, a=inputs[0], weight=weight, value=eps, count=heads, out=out)
            case "layer_norm":
                gains = {"weight": params["weight"], "bias": params["bias"], "value": params["eps"]}
                p.row_op(RowOp.LAYER_NORM, section, domain, a=inputs[0], **gains, out=out)
            case "rope":
                rotation, heads = self._rotation(params["table"]), params["num_heads"]
                p.row_op(RowOp.ROPE, section, domain, a=inputs[0], count=heads, rotation=rotation, out=out)
            case "scale_by_position":
                scale = params["scale"]
                steps = {"value": scale.beta, "count": scale.length, "shift": scale.shift}
                p.row_op(RowOp.SCALE_BY_POSITION, section, domain, a=inputs[0], **steps, out=out)
            case "attention":
                quantised_out = self._buffers.place(node.output, quantised=True) if params["quantised"] else -1
                options = (params["scale"], params["window"], params["soft_cap"])
                p.attention(params["layer"], inputs[0], out, *options, quantised_out)
            case "gated_mul":
                gate = _GATES[params["activation"]]
                p.row_op(RowOp.GATED_MUL, section, domain, a=inputs[0], b=inputs[1], gate=gate, out=out)
            case "activation":
                gate = _GATES[params["activation"]]
                p.row_op(RowOp.ACTIVATION, section, domain, a=inputs[0], gate=gate, out=out)
            case "add":
                p.row_op(RowOp.ADD, section, domain, a=inputs[0], b=inputs[1], out=out)
            case "scale":
                p.row_op(RowOp.SCALE, section, domain, a=inputs[0], value=params["factor"], out=out)
            case "select_rows":
                p.row_op(RowOp.SELECT_ROWS, section, domain, a=inputs[0], out=out)
            case "soft_cap":
                p.row_op(RowOp.SOFT_CAP, section, domain, a=inputs[0], value=params["cap"], out=out)
            case _:
                raise AssertionError(node.op)

    def _rotation(self, table: RopeTable) -> int:
        """The program's number for the rotations of a table, which all its layers share."""
        if table not in self._rotations:
            frequencies = inverse_frequencies(table).tolist()
            self._rotations[table] = self.program.rotation(frequencies, attention_factor(table))
        return self._rotations[table]


class BuiltProgram:
    """A finished program and where its results lie, for tests that look at them."""

    def __init__(self, program: _native.Program, hidden: int, logits: int) -> None:
        self.program, self.hidden, self.logits = program, hidden, logits


def _reads(item: Item) -> tuple[Symbol, ...]:
    return (item.symbol,) if isinstance(item, Quantise) else item.inputs


def _writes(item: Item) -> tuple[Symbol, ...]:
    if isinstance(item, Region):
        return item.outputs
    return (item.output,) if isinstance(item, Node) and item.output is not None else ()
