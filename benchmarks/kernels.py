"""The native kernels one by one: products per weight encoding and number of rows, attention per context length.

    python benchmarks/kernels.py --samples 10 --output benchmarks/results/kernels.json

Each figure is a whole step of a model that is nothing but that kernel, repeated over enough different weights (or
sequences) that they do not fit the caches, as in a real model. Compare with the machine's own limits, printed first:
reading from memory, and multiply-adds from registers. Pin an instruction set with OCTAVO_ISA.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from rich.console import Console
from rich.table import Table

from octavo.cli.report import host_facts, save
from octavo.core.model_config import ModelConfig
from octavo.kernels.base import Array, KVCacheLayout, ModelInput, Ops, Weight
from octavo.kernels.native.backend import NativeBackend
from octavo.weights.dequantise import Encoding, encoded_bytes
from octavo.weights.tensor import WeightTensor

ENCODINGS: tuple[Encoding, ...] = ("Q4_1", "Q4_0", "Q8_0", "BF16", "F32")
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
CONTEXTS = (256, 1024, 4096)
NUM_OUT, NUM_IN, MATRICES = 1536, 576, 64  # of SmolLM2-135M's gate; 64 of them are 35 MB in Q4_1
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 9, 3, 64, 8
BLOCK = 16


def model_config(vocab_size: int) -> ModelConfig:
    """Shapes of the attention; everything else is not looked at."""
    return ModelConfig(
        architecture="llama",
        name="kernels",
        hidden_size=NUM_IN,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=NUM_OUT,
        vocab_size=vocab_size,
        max_position=1 << 20,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        rope_dim=HEAD_DIM,
        tied_embeddings=True,
    )


@dataclass
class Kernel:
    """A model of one kernel: embedding, the kernel many times, one row of a tiny head that nobody asks for."""

    config: ModelConfig
    table: Weight
    call: Callable[[Ops, Array], Array]

    def hidden(self, ops: Ops) -> Array:
        return ops.select_logit_rows(self.call(ops, ops.embedding(self.table, ops.token_ids)))

    def head(self, ops: Ops, rows: Array) -> Array:
        return ops.scale(rows, 1.0)


def random_matrix(
    backend: NativeBackend, rng: np.random.Generator, shape: tuple[int, int], encoding: Encoding
) -> Weight:
    """Random integers and mantissas, scales near 2^-6: what is not zero takes its real time."""
    data = rng.integers(0, 256, encoded_bytes(encoding, shape), np.uint8)
    if encoding in ("F32", "BF16"):
        data = rng.normal(size=shape).astype(np.float32).view(np.uint32)
        data = data.view(np.uint8) if encoding == "F32" else (data >> 16).astype(np.uint16).view(np.uint8)
    else:
        groups = data.reshape(shape[0] * shape[1] // 32, -1)
        groups[:, : 4 if encoding == "Q4_1" else 2] = np.tile(np.frombuffer(b"\x00\x24", np.uint8), 2)[
            : 4 if encoding == "Q4_1" else 2
        ]
    tensor = WeightTensor(name="w", shape=shape, encoding=encoding, data=data.reshape(-1))
    return backend.pack(tensor, frozenset({"linear"}))


def step(
    num_seqs: int,
    queries: int,
    context: int,
    *,
    token_ids: Sequence[int] | None = None,
    logit_rows: Sequence[int] = (),
) -> ModelInput:
    """``num_seqs`` sequences of ``context`` positions, the last ``queries`` of which are run; all tokens are 0."""
    tokens, width = num_seqs * queries, -(-context // BLOCK)
    positions = np.tile(np.arange(context - queries, context, dtype=np.int32), num_seqs)
    tables = np.arange(num_seqs * width, dtype=np.int32).reshape(num_seqs, width)
    slots = tables[np.repeat(np.arange(num_seqs), queries), positions // BLOCK] * BLOCK + positions % BLOCK
    return ModelInput.of(
        token_ids=token_ids or [0] * tokens,
        positions=positions,
        slot_mapping=slots,
        logit_rows=logit_rows,
        query_starts=range(0, tokens + 1, queries),
        context_lens=[context] * num_seqs,
        block_tables=list(tables),
    )


def prepare(
    threads: int | None, width: int, call: Callable[[NativeBackend], Callable[[Ops, Array], Array]], num_blocks: int
) -> NativeBackend:
    """A backend with that kernel bound."""
    config = model_config(vocab_size=width)
    backend = NativeBackend(config, threads)
    table = random_matrix(backend, np.random.default_rng(0), (width, width), "F32")
    layout = KVCacheLayout.full(
        num_layers=LAYERS, num_blocks=num_blocks, block_size=BLOCK, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM
    )
    backend.allocate_kv_cache(layout)
    backend.bind(Kernel(config, table, call(backend)), max_tokens=1024, max_seqs=64)
    return backend


def sample(backend: NativeBackend, taken: ModelInput, samples: int) -> list[float]:
    """Seconds inside the kernels, after one run to warm up."""
    backend.run(taken, [])
    return [backend.run(taken, []).forward_s for _ in range(samples)]


def bench_linear(threads: int | None, encoding: Encoding, samples: int) -> list[dict[str, Any]]:
    """Rates of one encoding, by number of rows."""

    def call(backend: NativeBackend) -> Callable[[Ops, Array], Array]:
        rng = np.random.default_rng(1)
        weights = [random_matrix(backend, rng, (NUM_OUT, NUM_IN), encoding) for _ in range(MATRICES)]
        return lambda ops, x: [ops.linear(x, w) for w in weights][-1]

    backend = prepare(threads, NUM_IN, call, num_blocks=64)
    weight_bytes = MATRICES * encoded_bytes(encoding, (NUM_OUT, NUM_IN))
    results = []
    for rows in ROWS:
        seconds = sample(backend, step(1, rows, rows), samples)
        macs = MATRICES * NUM_OUT * NUM_IN * rows
        results.append(
            {
                "kernel": "linear",
                "encoding": encoding,
                "rows": rows,
                "macs": macs,
                "bytes": weight_bytes,
                "seconds": seconds,
            }
        )
    backend.close()
    return results


def bench_attention(threads: int | None, samples: int) -> list[dict[str, Any]]:
    """One query of 8 sequences, and 128 queries of one, by context length."""

    def call(backend: NativeBackend) -> Callable[[Ops, Array], Array]:
        def attend(ops: Ops, x: Array) -> Array:
            kv = KV_HEADS * HEAD_DIM
            k = ops.linear(x, random_matrix(backend, np.random.default_rng(2), (kv, NUM_IN), "F32"))
            for layer in range(LAYERS):
                ops.write_kv(layer, k, k)
                x = ops.paged_attention(layer, x, scale=HEAD_DIM**-0.5)
            return x

        return attend

    backend = prepare(threads, HEADS * HEAD_DIM, call, num_blocks=8 * max(CONTEXTS) // BLOCK)
    results = []
    for context in CONTEXTS:
        for num_seqs, queries in ((1, 1), (8, 1), (1, 128)):
            seconds = sample(backend, step(num_seqs, queries, context), samples)
            macs = 2 * LAYERS * HEADS * HEAD_DIM * num_seqs * queries * (context - queries // 2)
            read = (
                num_seqs * context * backend.kv_bytes_per_token(model_config(NUM_IN), model_config(NUM_IN).num_layers)
            )
            row = {"kernel": "attention", "context": context, "sequences": num_seqs, "queries": queries}
            results.append(row | {"macs": macs, "bytes": read, "seconds": seconds})
    backend.close()
    return results


def show(console: Console, results: list[dict[str, Any]]) -> None:
    """Medians as rates."""
    table = Table("kernel", "case", "ms", "GMAC/s", "GB/s of weights or KV")
    for r in results:
        median = statistics.median(cast(list[float], r["seconds"]))
        case = (
            f"{r['encoding']}, {r['rows']} rows"
            if "rows" in r
            else f"{r['sequences']} x {r['queries']} queries at {r['context']}"
        )
        table.add_row(
            r["kernel"],
            case,
            f"{median * 1e3:.2f}",
            f"{r['macs'] / median / 1e9:.1f}",
            f"{r['bytes'] / median / 1e9:.1f}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=None, help="compute threads; default: physical cores")
    parser.add_argument("--samples", type=int, default=10, help="runs per figure")
    parser.add_argument("--output", type=Path, default=None, help="JSON file with every sample")
    args = parser.parse_args()
    console = Console()
    probe = NativeBackend(model_config(NUM_IN), args.threads)
    speed = probe.measure_machine()
    memory = speed.read_bytes_per_s[-1][1]
    console.print(f"{probe.fingerprint}, {probe.threads} threads; reading from memory {memory / 1e9:.1f} GB/s")
    console.print(
        "at best " + ", ".join(f"{rate / 1e9:.0f} GMAC/s in {kind}" for kind, rate in speed.macs_per_s.items())
    )
    results = [row for encoding in ENCODINGS for row in bench_linear(args.threads, encoding, args.samples)]
    results += bench_attention(args.threads, args.samples)
    show(console, results)
    if args.output is not None:
        machine = {
            "read_bytes_per_s": speed.read_bytes_per_s,
            "macs_per_s": speed.macs_per_s,
            "kernels": probe.fingerprint,
        }
        save(args.output, {"host": host_facts(), "machine": machine, "threads": probe.threads, "results": results})


if __name__ == "__main__":
    main()
