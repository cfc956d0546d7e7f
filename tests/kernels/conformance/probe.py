"""Looking into a backend from outside: everything through ``pack``, ``bind``, ``allocate_kv_cache`` and ``run``.

A probe model computes y [T, width] from the embedded tokens. Its head is the identity and a row of zeros, so that
y_i = logprob of token i - logprob of the last token; the log-probabilities are asked for as those of a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from native_steps import Seq, step_input
from numpy.typing import NDArray

from octavo.core.model_config import ModelConfig
from octavo.kernels.base import Array, Backend, KVCacheLayout, Ops, Weight, WeightUse
from octavo.weights.tensor import WeightTensor

Floats = NDArray[np.float32]
WIDTH, HEAD_DIM, BLOCK, NUM_BLOCKS = 32, 16, 4, 64
VOCAB = WIDTH + 1
Call = Callable[[Ops, Array, Mapping[str, Weight]], Array]


def config(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "architecture": "llama", "name": "probe", "hidden_size": WIDTH, "num_layers": 1, "num_heads": 2,
        "num_kv_heads": 1, "head_dim": HEAD_DIM, "intermediate_size": WIDTH, "vocab_size": VOCAB, "max_position": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_dim": HEAD_DIM, "tied_embeddings": False,
    }  # fmt: skip
    return ModelConfig(**{**fields, **changes})


def f32(values: NDArray[Any], name: str = "w") -> WeightTensor:
    data = np.ascontiguousarray(values, np.float32)
    return WeightTensor(name=name, shape=data.shape, encoding="F32", data=data.reshape(-1).view(np.uint8))


class Probe:
    """A model around one call of ops."""

    def __init__(self, c: ModelConfig, weights: Mapping[str, Weight], call: Call, soft_cap: float | None) -> None:
        self.config, self._weights, self._call, self._soft_cap = c, weights, call, soft_cap

    def hidden(self, ops: Ops) -> Array:
        return ops.select_logit_rows(
            self._call(ops, ops.embedding(self._weights["table"], ops.token_ids), self._weights)
        )

    def head(self, ops: Ops, rows: Array) -> Array:
        return ops.logits(rows, self._weights["head"], self._soft_cap)


def bound(
    make: Callable[[ModelConfig], Backend],
    table: Floats,
    call: Call,
    weights: Mapping[str, tuple[WeightTensor, frozenset[WeightUse]]] | None = None,
    *,
    head: Floats | None = None,
    soft_cap: float | None = None,
    **changes: Any,
) -> Backend:
    """A backend that runs ``call``. table [VOCAB, WIDTH]: what each token embeds as."""
    c = config(**changes)
    made = make(c)
    packed = {name: made.pack(tensor, uses) for name, (tensor, uses) in (weights or {}).items()}
    packed["table"] = made.pack(f32(table), frozenset({"embedding"}))
    head = np.eye(VOCAB, WIDTH, dtype=np.float32) if head is None else head
    packed["head"] = made.pack(f32(head), frozenset({"head"}))
    made.bind(Probe(c, packed, call, soft_cap), max_tokens=256, max_seqs=16)
    made.allocate_kv_cache(
        KVCacheLayout.full(
            num_layers=c.num_layers, num_blocks=NUM_BLOCKS, block_size=BLOCK, num_kv_heads=1, head_dim=c.head_dim
        )
    )
    return made


def logprobs(made: Backend, chunks: Sequence[tuple[Seq, int]], copies: Sequence[Sequence[int]] = ()) -> Floats:
    """Of every row of a step that runs the next n positions of each sequence: [T, VOCAB]. They count as computed."""
    num_rows = sum(n for _, n in chunks)
    step = step_input(chunks, BLOCK, logit_rows=range(num_rows), copies=copies)
    found = np.empty((num_rows, VOCAB), np.float32)
    for token in range(VOCAB):  # the same step again: it writes what it has written
        out = made.run(step, [], [(token, 0)] * num_rows)
        found[:, token] = [np.nan if isinstance(row, str) else row.logprob for row in out.row_logprobs]
    for seq, n in chunks:
        seq.computed += n
    return found


def values(made: Backend, chunks: Sequence[tuple[Seq, int]], copies: Sequence[Sequence[int]] = ()) -> Floats:
    """y of every row, [T, WIDTH]."""
    found = logprobs(made, chunks, copies)
    return found[:, :WIDTH] - found[:, WIDTH:]


def activated(x: NDArray[np.float64], activation: str) -> NDArray[np.float64]:
    """The activation, written out."""
    if activation == "silu":
        return x / (1 + np.exp(-x))
    if activation == "gelu":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def table_of(seed: int = 1) -> Floats:
    return np.random.default_rng(seed).standard_normal((VOCAB, WIDTH)).astype(np.float32)


TABLE = table_of()


def computed(
    maker: Any, call: Call, weights: Any = None, *, count: int = 21, **options: Any
) -> tuple[Any, NDArray[np.float64]]:
    """(y of some tokens, their embedded rows in float64)."""
    made = bound(maker, TABLE, call, weights, **options)
    ids = tokens_of(count)
    try:
        return values(made, [(Seq(ids, list(range(count // BLOCK + 1))), count)]), TABLE[ids].astype(np.float64)
    finally:
        made.close()
