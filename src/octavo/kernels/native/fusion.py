"""Passes over recorded nodes: what may be computed together, without changing a bit of the result.

    linear, linear, linear of one input       -> one parallel region        (join_linears)
    linear gate, linear up, gated_mul         -> one gated product          (fuse_gates)
    linear, add                               -> product plus residual      (fuse_residuals)
    x that a product reads quantised          -> rounded once, by its maker where that has whole groups at hand
                                                                            (quantise_inputs)

Row ops need no pass: the program runs neighbouring ones row by row without a barrier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.kernels.native.recorder import Node, Symbol
from octavo.weights.dequantise import GROUP


@dataclass(slots=True)
class Part:
    """One product inside a parallel region; ``up`` makes it gated, ``residual`` is added to it."""

    node: Node
    output: Symbol
    up: Node | None = None
    activation: str = "silu"
    residual: Symbol | None = None
    quantised: bool = False  # also hands out its result quantised
    floats: bool = True  # hands out its result as it is

    @property
    def inputs(self) -> tuple[Symbol, ...]:
        return (*self.node.inputs, *(() if self.residual is None else (self.residual,)))


@dataclass(slots=True)
class Region:
    """Linear products that run at once."""

    parts: list[Part]

    @property
    def inputs(self) -> tuple[Symbol, ...]:
        return tuple(symbol for part in self.parts for symbol in part.inputs)

    @property
    def outputs(self) -> tuple[Symbol, ...]:
        return tuple(part.output for part in self.parts)


@dataclass(slots=True)
class Quantise:
    """Rounds a symbol to int8 groups or bfloat16 tiles (csrc/ops/types.h), for products that read it so."""

    symbol: Symbol


Item = Node | Region | Quantise


@dataclass(slots=True)
class Uses:
    """How often each symbol is read, so that a value read once can be fused away."""

    counts: Counter[Symbol] = field(default_factory=Counter)

    @classmethod
    def of(cls, nodes: Sequence[Node], result: Symbol) -> Uses:
        counts = Counter(symbol for node in nodes for symbol in node.inputs)
        counts[result] += 1
        return cls(counts)

    def once(self, symbol: Symbol | None) -> bool:
        return symbol is not None and self.counts[symbol] == 1


def fuse(nodes: Sequence[Node], result: Symbol, *, enabled: bool = True) -> list[Item]:
    """The items of one section in an order that can run. ``enabled=False`` keeps every op apart (for tests)."""
    uses = Uses.of(nodes, result)
    items: list[Item] = [_region(node) if node.op == "linear" else node for node in nodes]
    if enabled:
        items = join_linears(fuse_residuals(fuse_gates(items, uses), uses))
    items = quantise_inputs(items, by_maker=enabled)
    drop_unread_floats(items, result)
    return items


def fuse_gates(items: list[Item], uses: Uses) -> list[Item]:
    """gated_mul of two bias-free products of one input and one packing becomes one gated product."""
    made = _makers(items)
    dropped: set[int] = set()
    replaced: dict[int, Region] = {}
    for i, item in enumerate(items):
        if not (isinstance(item, Node) and item.op == "gated_mul"):
            continue
        sources = [made.get(symbol) for symbol in item.inputs]
        if not all(uses.once(symbol) for symbol in item.inputs) or None in sources:
            continue
        gate, up = (items[source].parts[0].node for source in sources)  # type: ignore[index, union-attr]
        same = gate.inputs == up.inputs and gate.params["weight"].kind == up.params["weight"].kind
        if same and gate.params["bias"] is None and up.params["bias"] is None:
            assert item.output is not None
            dropped.update(source for source in sources if source is not None)
            replaced[i] = Region([Part(gate, item.output, up=up, activation=item.params["activation"])])
    return [replaced.get(i, item) for i, item in enumerate(items) if i not in dropped]


def fuse_residuals(items: list[Item], uses: Uses) -> list[Item]:
    """add of a product that nobody else reads becomes the product's residual, at the place of the add."""
    made = _makers(items)
    dropped: set[int] = set()
    replaced: dict[int, Region] = {}
    for i, item in enumerate(items):
        if not (isinstance(item, Node) and item.op == "add"):
            continue
        for product, other in (item.inputs, item.inputs[::-1]):
            source = made.get(product)
            if source is None or not uses.once(product):
                continue
            region = items[source]
            assert isinstance(region, Region)
            assert item.output is not None
            part = region.parts[0]
            dropped.add(source)
            replaced[i] = Region([Part(part.node, item.output, part.up, part.activation, other)])
            break
    return [replaced.get(i, item) for i, item in enumerate(items) if i not in dropped]


def join_linears(items: list[Item]) -> list[Item]:
    """Products of one input run at the place of the first of them: what they read is there already."""
    regions: dict[tuple[Symbol, ...], Region] = {}
    joined: list[Item] = []
    for item in items:
        if isinstance(item, Region) and all(part.residual is None for part in item.parts):
            first = regions.get(item.parts[0].node.inputs)
            if first is not None:
                first.parts += item.parts
                continue
            regions[item.parts[0].node.inputs] = item
        joined.append(item)
    return joined


def quantise_inputs(items: list[Item], *, by_maker: bool) -> list[Item]:
    """Each symbol that a region reads quantised is rounded once: by the op that makes it, or by a ``Quantise`` before
    the first such region. Gated products and attention finish whole groups of 32 columns, so they can do it.
    """
    makers: dict[Symbol, Part | Node] = {}
    done: set[Symbol] = set()
    out: list[Item] = []
    for item in items:
        if isinstance(item, Region):
            for part in item.parts:
                (x,) = part.node.inputs
                if part.node.params["reads_quantised"] and x not in done:
                    done.add(x)
                    maker = makers.get(x)
                    if isinstance(maker, Part):
                        maker.quantised = True
                    elif maker is not None:
                        maker.params["quantised"] = True
                    else:
                        out.append(Quantise(x))
            if by_maker:
                makers |= {p.output: p for p in item.parts if p.up is not None and p.output.width % GROUP == 0}
        elif by_maker and isinstance(item, Node) and item.op == "attention" and item.params["group_width"] % GROUP == 0:
            assert item.output is not None
            makers[item.output] = item
        out.append(item)
    return out


def drop_unread_floats(items: list[Item], result: Symbol) -> None:
    """A result that is only read quantised is not written as floats: for a long prompt that is the most traffic."""
    read = {result}
    for item in items:
        if isinstance(item, Region):
            read |= {x for p in item.parts for x in p.node.inputs if not p.node.params["reads_quantised"]}
            read |= {p.residual for p in item.parts if p.residual is not None}
        else:
            read |= {item.symbol} if isinstance(item, Quantise) else set(item.inputs)
    for item in items:
        if isinstance(item, Region):
            for part in item.parts:
                part.floats = not part.quantised or part.output in read


def _region(node: Node) -> Region:
    assert node.output is not None
    return Region([Part(node, node.output)])


def _makers(items: Sequence[Item]) -> dict[Symbol, int]:
    """Which single-product region makes a symbol."""
    return {item.parts[0].output: i for i, item in enumerate(items) if isinstance(item, Region)}
