"""Products with every packed format beside Q4_1, in turns: what share of the machine's bound each reaches.

    OCTAVO_ISA=avx512 python benchmarks/formats.py --rounds 9 --output benchmarks/results/formats-HOST-avx512.json

A sample is one pass over sixteen matrices [2048, 2048], which fit no cache as a whole: seconds on the clock, and
seconds of CPU, which time that others take does not lengthen. Formats take turns within a round, so that a busy machine
slows all of them; ratios are of CPU seconds within a round. With one thread, the default, nobody waits. The share
of the bound is (packed bytes / bandwidth) / time with one row, which memory binds, and (multiply-adds / rate) / time
with more. In a ratio of two formats bandwidth and rate cancel out:

    memory       (bytes / time) of the format / the same of Q4_1
    arithmetic   time of Q4_1 / time of the format
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from kernels import prepare, step
from octavo.cli.report import host_facts, save
from octavo.core.config import DummyFormat
from octavo.kernels.base import Array, Ops
from octavo.kernels.native.backend import NativeBackend
from octavo.model.dummy import random_matrix
from octavo.weights.tensor import WeightTensor

WIDTH, MATRICES = 2048, 16
ROWS = (1, 4, 16, 64)
MEMORY_ROWS = 1  # up to so many rows the bound is memory
BASE: DummyFormat = "Q4_1"
FORMATS: tuple[DummyFormat, ...] = (
    "Q4_1", "Q8_0", "Q4_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ2_XS",
)  # fmt: skip


def bound(encoding: DummyFormat, threads: int) -> NativeBackend:
    """A backend whose model is sixteen products."""

    def call(backend: NativeBackend) -> Callable[[Ops, Array], Array]:
        weights = []
        for i in range(MATRICES):
            data = random_matrix(np.random.default_rng(i), (WIDTH, WIDTH), encoding)
            tensor = WeightTensor(name="w", shape=(WIDTH, WIDTH), encoding=encoding, data=data)
            weights.append(backend.pack(tensor, frozenset({"linear"})))
        return lambda ops, x: [ops.linear(x, w) for w in weights][-1]

    return prepare(threads, WIDTH, call, num_blocks=64)


def measure(formats: tuple[DummyFormat, ...], rounds: int, threads: int) -> list[dict[str, Any]]:
    """Every sample, by format and number of rows."""
    backends = {encoding: bound(encoding, threads) for encoding in formats}
    steps = {rows: step(1, rows, rows) for rows in ROWS}
    results: dict[tuple[DummyFormat, int], dict[str, Any]] = {
        (encoding, rows): {
            "format": encoding,
            "rows": rows,
            "bytes": backend.weight_bytes((WIDTH, WIDTH), encoding, frozenset({"linear"})).packed * MATRICES,
            "seconds": [],
            "cpu_seconds": [],
        }
        for encoding, backend in backends.items()
        for rows in ROWS
    }
    for number in range(rounds + 1):
        for rows, taken in steps.items():
            for encoding, backend in backends.items():
                begun = time.process_time()
                seconds = backend.run(taken, []).forward_s
                if number:  # the first round warms up
                    results[encoding, rows]["seconds"].append(seconds)
                    results[encoding, rows]["cpu_seconds"].append(time.process_time() - begun)
    return list(results.values())


def shares(results: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """Share of the bound over that of Q4_1: the median over rounds."""
    base = {r["rows"]: r for r in results if r["format"] == BASE}
    found = {}
    for r in results:
        b = base[r["rows"]]
        weight = r["bytes"] / b["bytes"] if r["rows"] <= MEMORY_ROWS else 1.0
        found[r["format"], r["rows"]] = statistics.median(
            weight * theirs / ours for ours, theirs in zip(r["cpu_seconds"], b["cpu_seconds"], strict=True)
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--formats", nargs="+", choices=get_args(DummyFormat), default=FORMATS)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    formats = tuple(dict.fromkeys((BASE, *args.formats)))
    results = measure(formats, args.rounds, args.threads)
    ratio = shares(results)
    table = Table("format", *(f"{rows} rows" for rows in ROWS), title=f"share of the bound / that of {BASE}")
    for encoding in formats:
        table.add_row(encoding, *(f"{ratio[encoding, rows]:.2f}" for rows in ROWS))
    Console().print(table)
    if args.output:
        save(args.output, {"host": host_facts(), "width": WIDTH, "matrices": MATRICES, "results": results})


if __name__ == "__main__":
    main()
