"""The best possible time of a step on this machine: a roofline (Williams et al. 2009) over memory and arithmetic.

A step reads the packed weights once and each sequence's KV, and multiplies what its tokens need. It cannot be faster
than the measured memory reads those bytes, nor faster than the measured vector units do those multiplications.
Dequantisation, norms, sampling, threads that wait for each other and Python come on top and are not in the bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.cli.console import human_bytes
from octavo.cli.tables import Table

if TYPE_CHECKING:
    from octavo.kernels.base import MachineSpeed, ModelCost

#: The cases that are shown and measured unless somebody asks for others.
STREAMS = (1, 8, 32, 64)
CONTEXT = 256
PREFILLS = (512, 4096)

Chunk = tuple[int, int]  # (first position, number of positions) that a step runs of one sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What one or several steps must at least do, and how long that takes."""

    bytes: int  # of weights and KV to read
    macs: int  # multiply-adds
    memory_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        """Memory and arithmetic can overlap, at best wholly."""
        return max(self.memory_s, self.compute_s)

    @property
    def limit(self) -> str:
        return "memory" if self.memory_s >= self.compute_s else "arithmetic"


def decode_bound(cost: ModelCost, speed: MachineSpeed, *, streams: int, context: int) -> Bound:
    """One token for each stream; ``context``: positions that each token sees, itself included."""
    return step_bound(cost, speed, [(context - 1, 1)] * streams, num_rows=streams)


def prefill_bound(cost: ModelCost, speed: MachineSpeed, *, tokens: int, chunk: int) -> list[Bound]:
    """A prompt in steps of at most ``chunk`` tokens, the last of which draws."""
    starts = range(0, tokens, chunk)
    return [
        step_bound(cost, speed, [(start, min(chunk, tokens - start))], num_rows=int(start == starts[-1]))
        for start in starts
    ]


def step_bound(cost: ModelCost, speed: MachineSpeed, chunks: Sequence[Chunk], *, num_rows: int) -> Bound:
    """One step that runs these chunks and wants the logits of ``num_rows`` rows."""
    num_tokens = sum(length for _, length in chunks)
    pairs = positions = 0  # summed over layers
    for window, num_layers in Counter(cost.windows).items():
        pairs += num_layers * sum(_visible_pairs(start, length, window) for start, length in chunks)
        positions += num_layers * sum(_read_positions(start, length, window) for start, length in chunks)
    num_layers = len(cost.windows)
    head_macs = cost.head_macs * num_rows
    quantised = cost.quantised_macs * num_tokens + (head_macs if cost.head_is_quantised else 0)
    attention = cost.attention_macs * pairs // num_layers
    floats = cost.float_macs * num_tokens + attention + (0 if cost.head_is_quantised else head_macs)
    num_bytes = cost.layer_bytes + (cost.head_bytes if num_rows else 0) + cost.kv_bytes * positions // num_layers
    return Bound(
        bytes=num_bytes,
        macs=quantised + floats,
        memory_s=num_bytes / read_rate(speed, num_bytes),
        compute_s=quantised / max(speed.macs_per_s.values()) + floats / float_rate(speed),
    )


def read_rate(speed: MachineSpeed, working_set: int) -> float:
    """Bytes per second of reading ``working_set`` bytes over and over.

    A smaller set is never slower, whatever disturbed its measurement; between two sizes the faster one counts.
    """
    from_here = [index for index, (size, _) in enumerate(speed.read_bytes_per_s) if size <= working_set]
    first = from_here[-1] if from_here else 0
    return max(rate for _, rate in speed.read_bytes_per_s[first:])


def float_rate(speed: MachineSpeed) -> float:
    """Multiply-adds per second of float operands. Quantised weights may be dequantised: they have any arithmetic."""
    return max(rate for kind, rate in speed.macs_per_s.items() if kind != "int8")


def _visible_pairs(start: int, length: int, window: int | None) -> int:
    """(query, visible position) pairs: a query at p sees p + 1 positions, or the window."""
    if window is None or start + length <= window:
        return length * start + length * (length + 1) // 2
    return sum(min(position + 1, window) for position in range(start, start + length))


def _read_positions(start: int, length: int, window: int | None) -> int:
    """Cached positions that some query sees; each is read at least once."""
    return start + length - (0 if window is None else max(0, start + 1 - window))


def speed_rows(speed: MachineSpeed) -> list[tuple[str, str]]:
    """The measured machine, for a table. A multiply-add counts as two operations."""
    reads = ", ".join(f"{human_bytes(size)} {read_rate(speed, size) / 1e9:.1f}" for size, _ in speed.read_bytes_per_s)
    arithmetic = ", ".join(f"{kind} {2 * rate / 1e9:,.0f}" for kind, rate in speed.macs_per_s.items())
    return [("reading, GB/s", reads), ("arithmetic, Gop/s", arithmetic)]


def bound_table(cost: ModelCost, speed: MachineSpeed, *, max_model_len: int, chunk: int) -> Table:
    """The best possible figures of the usual cases that fit ``max_model_len``; prompts run ``chunk`` tokens a step."""
    cases = [
        (f"{streams} stream{'s' if streams > 1 else ''} at {CONTEXT}", streams, [bound])
        for streams in STREAMS
        if max_model_len >= CONTEXT
        for bound in [decode_bound(cost, speed, streams=streams, context=CONTEXT)]
    ]
    cases += [
        (f"prefill of {tokens:,}", tokens, prefill_bound(cost, speed, tokens=tokens, chunk=chunk))
        for tokens in PREFILLS
        if max_model_len >= tokens
    ]
    rows = []
    for name, tokens, bounds in cases:
        seconds = sum(bound.seconds for bound in bounds)
        row = (
            name,
            human_bytes(sum(bound.bytes for bound in bounds)),
            f"{2e-9 * sum(bound.macs for bound in bounds):,.1f}",
            max(bounds, key=lambda bound: bound.seconds).limit,
            f"{seconds * 1e3:,.2f}",
            f"{tokens / seconds:,.0f}",
        )
        rows.append(row)
    headings = ("case", "reads", "Gop", "bound by", "ms", "tokens/s")
    return Table(title="Best possible here", headings=headings, rows=rows, text=(0, 3))
