"""Hot paths in C++: a product of each kind, attention, draws, and a whole step. One thread.

As in ``benchmarks/kernels.py``, each is a step of a model that is nothing but that kernel.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from hot_path import Iteration, hot_path

from kernels import BLOCK, HEAD_DIM, HEADS, KV_HEADS, NUM_IN, NUM_OUT, Kernel, model_config, random_matrix, step
from octavo.core.plan import DrawRule
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.base import Array, KVCacheLayout, Model, Ops
from octavo.kernels.native.backend import NativeBackend
from octavo.model import decoder
from octavo.model.dummy import DummyWeights
from octavo.weights.dequantise import Encoding

LAYERS = 2


class Head(Kernel):
    """The same where rows are wanted: their hidden state is their logits, or what a head makes logits of."""

    def hidden(self, ops: Ops) -> Array:
        return ops.select_logit_rows(ops.embedding(self.table, ops.token_ids))

    def head(self, ops: Ops, rows: Array) -> Array:
        return self.call(ops, rows)


def bound(backend: NativeBackend, model: Model, num_blocks: int) -> NativeBackend:
    backend.allocate_kv_cache(
        KVCacheLayout.full(
            num_layers=LAYERS, num_blocks=num_blocks, block_size=BLOCK, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM
        )
    )
    backend.bind(model, max_tokens=128, max_seqs=64)
    return backend


def product(encoding: Encoding, rows: int) -> Iteration:
    """x [rows, 576] times four matrices [1536, 576]."""
    config = model_config(NUM_IN)
    backend, rng = NativeBackend(config, 1), np.random.default_rng(0)
    weights = [random_matrix(backend, rng, (NUM_OUT, NUM_IN), encoding) for _ in range(4)]
    table = random_matrix(backend, rng, (NUM_IN, NUM_IN), "F32")
    model = Kernel(config, table, lambda ops, x: [ops.linear(x, w) for w in weights][-1])
    taken = step(1, rows, rows)
    bound(backend, model, num_blocks=8)
    return lambda: backend.run(taken, [])


for _encoding, _rows in (
    ("Q4_1", 1),
    ("Q4_1", 8),
    ("Q4_0", 1),
    ("Q4_0", 8),
    ("Q8_0", 1),
    ("Q8_0", 8),
    ("BF16", 1),
    ("BF16", 8),
    ("F32", 1),
    ("F32", 8),
):

    def _product(encoding: Encoding = _encoding, rows: int = _rows) -> Iteration:  # type: ignore[assignment]
        return product(encoding, rows)

    hot_path(f"product: {_encoding}, {_rows} row{'s' * (_rows > 1)}", "native")(_product)


def attention(num_seqs: int, queries: int) -> Iteration:
    """Two layers of attention over 256 positions."""
    width = HEADS * HEAD_DIM
    config = model_config(width)
    backend, rng = NativeBackend(config, 1), np.random.default_rng(0)
    weight = random_matrix(backend, rng, (KV_HEADS * HEAD_DIM, width), "F32")

    def attend(ops: Ops, x: Array) -> Array:
        k = ops.linear(x, weight)
        for layer in range(LAYERS):
            ops.write_kv(layer, k, k)
            x = ops.paged_attention(layer, x, scale=HEAD_DIM**-0.5)
        return x

    model = Kernel(config, random_matrix(backend, rng, (width, width), "F32"), attend)
    taken = step(num_seqs, queries, 256)
    bound(backend, model, num_blocks=num_seqs * 16)
    return lambda: backend.run(taken, [])


@hot_path("attention: 8 sequences, one query each", "native")
def _one_query() -> Iteration:
    return attention(8, 1)


@hot_path("attention: one sequence, 64 queries", "native")
def _many_queries() -> Iteration:
    return attention(1, 64)


def logits(params: SamplingParams, encoding: Encoding | None = None) -> Iteration:
    """Eight draws. No encoding: from rows of the table itself, 16,384 logits each; else through a head of 4,096."""
    vocab, hidden = (4096, NUM_IN) if encoding else (16_384, 16_384)
    config = model_config(vocab)
    backend, rng = NativeBackend(config, 1), np.random.default_rng(0)
    table = random_matrix(backend, rng, (16, hidden), "F32")
    head = random_matrix(backend, rng, (vocab, NUM_IN), encoding) if encoding else None
    model = Head(config, table, lambda ops, x: ops.scale(x, 4.0) if head is None else ops.logits(x, head))
    taken = step(8, 1, 16, token_ids=range(8), logit_rows=range(8))
    draws = [DrawRule(params=params, random_stream=i) for i in range(8)]
    bound(backend, model, num_blocks=8)
    return lambda: backend.run(taken, draws)


@hot_path("head: Q8_0 of 4,096 tokens, 8 rows, greedy", "native")
def _head() -> Iteration:
    return logits(SamplingParams(temperature=0.0), "Q8_0")


@hot_path("draws: 8 greedy of 16,384", "native")
def _greedy() -> Iteration:
    return logits(SamplingParams(temperature=0.0))


@hot_path("draws: 8 with top-p of 16,384", "native")
def _top_p() -> Iteration:
    return logits(SamplingParams(temperature=0.8, top_p=0.9))


@hot_path("draws: 8 with top-k, penalties and logprobs of 16,384", "native")
def _top_k() -> Iteration:
    return logits(SamplingParams(temperature=0.8, top_k=40, logprobs=5))


@hot_path("step: 8 decodes of a llama of two layers, Q4_1", "native")
def _step() -> Iteration:
    """All of the kernels in one program, with what lies between them."""
    config = dataclasses.replace(model_config(1024), num_layers=LAYERS)
    backend = NativeBackend(config, 1)
    model = decoder.load(DummyWeights(config, "Q4_1"), backend)
    bound(backend, model, num_blocks=64)
    taken = step(8, 1, 100, logit_rows=range(8))
    draws = [DrawRule(params=SamplingParams(temperature=0.8), random_stream=i) for i in range(8)]
    return lambda: backend.run(taken, draws)
