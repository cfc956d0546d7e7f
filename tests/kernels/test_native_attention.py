"""Paged attention of the native kernels against dense attention in float64, on every ISA of this host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from native_models import ISAS, allocate, backend, config, to_bfloat16
from native_steps import Seq, step_input
from numpy.typing import NDArray

from octavo.core.model_config import ModelConfig
from octavo.kernels.base import Array, Ops
from octavo.kernels.native.backend import Activations, NativeBackend
from octavo.weights.tensor import WeightTensor

Floats = NDArray[np.float32]


class AttentionModel:
    """Token t embeds as row t of [q, k, v] tables; the pass is one write and one attention."""

    def __init__(self, made: NativeBackend, c: ModelConfig, tables: list[Floats], **options: object) -> None:
        self.config, self._options = c, options
        self._tables = [
            made.pack(
                WeightTensor(name="x", shape=t.shape, encoding="F32", data=t.reshape(-1).view(np.uint8)),
                frozenset({"embedding"}),
            )
            for t in tables
        ]

    def hidden(self, ops: Ops) -> Array:
        q, k, v = (ops.embedding(table, ops.token_ids) for table in self._tables)
        ops.write_kv(1, k, v)
        return ops.select_logit_rows(ops.paged_attention(1, q, **self._options))  # type: ignore[arg-type]

    def head(self, ops: Ops, rows: Array) -> Array:
        return ops.logits(rows, self._tables[0])


def dense(
    q: Floats, k: Floats, v: Floats, c: ModelConfig, scale: float, window: int | None, soft_cap: float | None
) -> NDArray[np.float64]:
    """Causal attention over one sequence, nothing paged, float64: [T, H * D]."""
    n, d = len(q), c.head_dim
    group = c.num_heads // c.num_kv_heads
    heads = q.astype(np.float64).reshape(n, c.num_heads, d)
    keys, values = (np.repeat(x.astype(np.float64).reshape(n, c.num_kv_heads, d), group, axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", heads, keys) * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    age = np.arange(n)[:, None] - np.arange(n)[None, :]
    visible = (age >= 0) & (age < (window or n))
    scores = np.where(visible, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), values).reshape(n, -1)


def run_chunks(
    isa: str,
    c: ModelConfig,
    tables: list[Floats],
    chunks: list[int],
    blocks: list[int],
    block_size: int,
    kv_dtype: str,
    threads: int = 1,
    activations: Activations = "int8",
    **options: object,
) -> Floats:
    """One sequence of len(tables[0]) tokens, run in the given chunks, in the given blocks, which start out as NaN."""
    made = backend(c, isa, threads=threads, kv_dtype=kv_dtype, activations=activations)
    allocate(made, c, num_blocks=max(blocks) + 2, block_size=block_size)
    assert made._kv is not None
    for block in range(max(blocks) + 2):
        made._kv.poison(block)
    made.bind(AttentionModel(made, c, tables, **options), max_tokens=len(tables[0]), max_seqs=2)
    seq, out = Seq(list(range(len(tables[0]))), blocks), []
    for n in chunks:
        made.run(step_input([(seq, n)], block_size, logit_rows=range(n)), [], [(0, 0)] * n)
        seq.computed += n
        out.append(made._built.program.read(made._built.hidden, n))
    made.close()
    return np.concatenate(out)


def tables_for(c: ModelConfig, n: int, seed: int = 0) -> list[Floats]:
    rng = np.random.default_rng(seed)
    widths = (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim)
    return [rng.normal(size=(n, width)).astype(np.float32) for width in widths]


CASES = [  # heads, KV heads, head_dim, block_size, window, soft_cap
    (9, 3, 64, 16, None, None),
    (4, 4, 16, 32, None, 20.0),
    (8, 1, 80, 16, 100, None),
    (5, 1, 20, 16, 17, 5.0),
    (4, 2, 16, 5, None, None),
    (4, 2, 24, 24, 300, None),
    (14, 2, 64, 1, 33, None),
]


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size", "window", "soft_cap"), CASES)
def test_paged_attention_equals_dense_attention(
    heads: int, kv_heads: int, head_dim: int, block_size: int, window: int | None, soft_cap: float | None, kv_dtype: str
) -> None:
    n = 300  # more than one tile of 256
    c = config(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rope_dim=head_dim, vocab_size=n)
    tables = tables_for(c, n)
    blocks = list(np.random.default_rng(1).permutation(-(-n // block_size)).tolist())
    scale = head_dim**-0.5
    wanted = dense(*tables, c, scale, window, soft_cap)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    results = [run_chunks(isa, c, tables, [n], blocks, block_size, kv_dtype, **options) for isa in ISAS]
    assert np.abs(results[0] - wanted).max() < (3e-6 if kv_dtype == "float32" else 0.03)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("window", [None, 40, 256])
def test_attention_does_not_depend_on_chunks_blocks_or_threads_to_the_last_bit(window: int | None) -> None:
    n = 530
    c = config(num_heads=6, num_kv_heads=2, head_dim=32, rope_dim=32, vocab_size=n)
    tables, rng = tables_for(c, n), np.random.default_rng(2)
    options = {"scale": 0.2, "window": window}
    whole = run_chunks("", c, tables, [n], list(range(34)), 16, "bfloat16", **options)
    for chunks in ([1] * 40 + [n - 40], [255, 1, 1, 255, 18], [100, 200, 7, 223], [n - 1, 1]):
        shuffled = rng.permutation(34).tolist()
        parts = run_chunks("", c, tables, chunks, shuffled, 16, "bfloat16", threads=2, **options)
        np.testing.assert_array_equal(parts, whole)
    for block_size in (32, 48, 5):
        blocks = rng.permutation(-(-n // block_size)).tolist()
        other = run_chunks("", c, tables, [33, n - 33], blocks, block_size, "bfloat16", **options)
        np.testing.assert_array_equal(other, whole)


def assert_same_bits(result: Floats, wanted: Floats, note: str = "") -> None:
    """Zeros of either sign differ; NaN equals NaN."""
    np.testing.assert_array_equal(np.isnan(result), np.isnan(wanted), note)
    finite = ~np.isnan(wanted)
    np.testing.assert_array_equal(result[finite].view(np.uint32), wanted[finite].view(np.uint32), note)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size", "window", "soft_cap"), CASES)
def test_attention_in_bfloat16_equals_dense_attention_of_rounded_operands(
    heads: int, kv_heads: int, head_dim: int, block_size: int, window: int | None, soft_cap: float | None
) -> None:
    n = 300
    c = config(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rope_dim=head_dim, vocab_size=n)
    tables = tables_for(c, n)
    blocks = list(np.random.default_rng(1).permutation(-(-n // block_size)).tolist())
    scale = head_dim**-0.5
    q, k, v = tables
    wanted = dense(to_bfloat16(q * np.float32(scale)), to_bfloat16(k), to_bfloat16(v), c, 1.0, window, soft_cap)
    options: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap}
    results = [
        run_chunks(isa, c, tables, [n], blocks, block_size, "bfloat16", activations="bf16", **options) for isa in ISAS
    ]
    assert np.abs(results[0] - wanted).max() < 0.006  # the weights are rounded too: 2^-9 of values up to 4
    for result, isa in zip(results[1:], ISAS[1:], strict=True):
        assert_same_bits(result, results[0], isa)
    in_float = run_chunks("", c, tables, [n], blocks, block_size, "bfloat16", **options)
    assert not np.array_equal(results[0], in_float)


def test_attention_in_bfloat16_needs_a_bfloat16_cache() -> None:
    """With a float32 cache, the arithmetic of the linear layers changes nothing."""
    n = 70
    c = config(num_heads=6, num_kv_heads=2, head_dim=24, rope_dim=24, vocab_size=n)
    tables = tables_for(c, n)
    run = [
        run_chunks("", c, tables, [n], list(range(5)), 16, "float32", activations=activations, scale=0.2)
        for activations in ("int8", "bf16")
    ]
    assert_same_bits(run[1], run[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("window", "size"), [(None, 1.0), (40, 1.0), (200, 4e-38)])
def test_attention_in_bfloat16_does_not_depend_on_chunks_blocks_or_threads_to_the_last_bit(
    window: int | None, size: float, isa: str
) -> None:
    """Values of 4e-38: sums underflow, where an unseen position could change the sign of a zero."""
    n = 300
    c = config(num_heads=3, num_kv_heads=1, head_dim=40, rope_dim=40, vocab_size=n)
    tables, rng = tables_for(c, n), np.random.default_rng(2)
    tables[2] = (tables[2].astype(np.float64) * size).astype(np.float32)
    options: dict[str, Any] = {"scale": 0.2, "window": window, "activations": "bf16"}
    whole = run_chunks(isa, c, tables, [n], list(range(19)), 16, "bfloat16", **options)
    for chunks, block_size in (([1] * 40 + [n - 40], 16), ([255, 1, 1, 43], 32), ([33, 260, 7], 5)):
        blocks = rng.permutation(-(-n // block_size)).tolist()
        parts = run_chunks(isa, c, tables, chunks, blocks, block_size, "bfloat16", threads=2, **options)
        assert_same_bits(parts, whole, f"{chunks}, blocks of {block_size}")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("isa", ISAS)
def test_in_bfloat16_a_token_that_is_not_finite_reaches_only_rows_that_see_it(isa: str, bad: float) -> None:
    n, at, window = 90, 41, 20
    c = config(num_heads=6, num_kv_heads=2, head_dim=32, rope_dim=32, vocab_size=n)
    good = tables_for(c, n)
    broken = [t.copy() for t in good]
    for table in broken:
        table[at] = bad
    options: dict[str, Any] = {"scale": 0.2, "window": window, "activations": "bf16"}
    clean, result = (
        run_chunks(isa, c, tables, [n], list(range(6)), 16, "bfloat16", **options) for tables in (good, broken)
    )
    assert_same_bits(result[:at], clean[:at])
    assert np.isnan(result[at : at + window]).all()
    assert_same_bits(result[at + window :], clean[at + window :])


@pytest.mark.parametrize("seed", range(12))
def test_in_bfloat16_all_instruction_sets_agree_bit_for_bit_on_random_shapes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kv_heads, group = int(rng.integers(1, 3)), int(rng.integers(1, 5))
    head_dim = int(rng.choice([2, 16, 18, 32, 34, 48, 64, 96, 112, 128, 192, 256, 288]))
    block_size, n = int(rng.choice([1, 3, 16, 24, 32, 64])), int(rng.integers(1, 300))
    heads = kv_heads * group
    c = config(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rope_dim=head_dim, vocab_size=n)
    tables = tables_for(c, n, seed)
    if seed % 3 == 0:  # some values that must not spread
        spoiled = rng.integers(0, n, 2), rng.integers(0, kv_heads * head_dim, 2)
        tables[int(rng.integers(0, 3))][spoiled] = rng.choice([np.nan, np.inf, -np.inf], 2)
    cut = int(rng.integers(0, n))
    chunks = [m for m in (cut, n - cut) if m]
    blocks = rng.permutation(-(-n // block_size)).tolist()
    options: dict[str, Any] = {
        "scale": float(rng.choice([head_dim**-0.5, 1.0])),
        "window": None if rng.random() < 0.5 else int(rng.integers(1, 300)),
        "soft_cap": None if rng.random() < 0.7 else float(rng.choice([5.0, 50.0])),
        "activations": "bf16",
    }
    results = [run_chunks(isa, c, tables, chunks, blocks, block_size, "bfloat16", **options) for isa in ISAS]
    for result, isa in zip(results[1:], ISAS[1:], strict=True):
        assert_same_bits(result, results[0], f"{isa}: {chunks} of {options}")
