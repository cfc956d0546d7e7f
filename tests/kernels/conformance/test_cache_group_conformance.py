"""Layers that keep different things: each group has blocks, slots, tables and copies of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS
from probe import BLOCK, HEAD_DIM, TABLE, VOCAB, bound, config, tokens_of
from test_conformance import dense, packed_qkv

from octavo.core.cache_group import CacheGroup
from octavo.core.errors import ConfigError
from octavo.kernels.base import Array, Backend, KVCacheLayout, ModelInput, Ops, Weight

WINDOW = 6
GROUPS = (CacheGroup(kind="full", layers=(1,)), CacheGroup(kind="window", layers=(0, 2), window=WINDOW))


def three_layers(ops: Ops, x: Array, w: Mapping[str, Weight]) -> Array:
    """What layer 1, which sees everything, adds to what a window shows to layers 0 and 2."""
    table = config().ropes[0]
    k, v = ops.rope(ops.linear(x, w["k"]), ops.positions, 1, table), ops.linear(x, w["v"])
    q = ops.rope(ops.linear(x, w["q"]), ops.positions, 2, table)
    for layer in range(3):
        ops.write_kv(layer, k, v)
    first, middle, last = (
        ops.paged_attention(layer, q, scale=0.3, window=None if layer == 1 else WINDOW) for layer in range(3)
    )
    return ops.add(ops.add(first, middle), last)


def expected(ids: list[int]) -> np.ndarray:
    return dense(ids, None, None) + 2 * dense(ids, WINDOW, None)


class Sequence:
    """Known tokens, and a table for each group; entries that the window has left are -1."""

    def __init__(self, tokens: list[int], full: list[int], window: list[int]) -> None:
        self.tokens, self.tables, self.computed = tokens, [list(full), list(window)], 0

    def step(self, made: Backend, count: int, copies: tuple[tuple[int, int, int, int], ...] = ()) -> np.ndarray:
        """y of the next ``count`` positions."""
        positions = range(self.computed, self.computed + count)
        for block in range(max(0, self.computed - WINDOW + 1) // BLOCK):
            self.tables[1][block] = -1
        step = ModelInput.of(
            token_ids=[self.tokens[p] for p in positions],
            positions=positions,
            slot_mapping=[table[p // BLOCK] * BLOCK + p % BLOCK for table in self.tables for p in positions],
            logit_rows=range(count),
            query_starts=[0, count],
            context_lens=[positions.stop],
            block_tables=self.tables,
            copies=copies,
        )
        found = np.empty((count, VOCAB))
        for token in range(VOCAB):
            rows = made.run(step, [], [(token, 0)] * count).row_logprobs
            found[:, token] = [np.nan if isinstance(row, str) else row.logprob for row in rows]
        self.computed += count
        return found[:, :-1] - found[:, -1:]


@pytest.fixture(params=BACKENDS)
def made(request: pytest.FixtureRequest) -> Any:
    backend = bound(BACKENDS[request.param][0], TABLE, three_layers, packed_qkv(), num_layers=3)
    layout = KVCacheLayout(groups=GROUPS, num_blocks=(12, 5), block_size=BLOCK, num_kv_heads=1, head_dim=HEAD_DIM)
    said = [backend.kv_bytes_per_token(config(), len(group.layers)) for group in GROUPS]
    assert backend.allocate_kv_cache(layout) == BLOCK * (12 * said[0] + 5 * said[1])
    yield backend
    backend.close()


def test_each_layer_reads_the_blocks_of_its_own_group(made: Backend) -> None:
    seq = Sequence(
        tokens_of(27), [3, 1, 4, 2, 9, 11, 8], [0, 2, 4, 1, 3, 0, 2]
    )  # blocks of the window come round again
    found = np.concatenate([seq.step(made, count) for count in (5, 1, 9, 1, 1, 4, 6)])
    np.testing.assert_allclose(found, expected(seq.tokens), atol=1e-3)


def test_a_copy_stays_in_its_group(made: Backend) -> None:
    source = Sequence(tokens_of(20), [3, 1, 4, 2, 9], [0, 2, 4, 1, 3])
    source.step(made, 10)
    other = Sequence(source.tokens[:10] + tokens_of(6, 5), [3, 1, 10, 7], [0, 2, 3, 1])
    other.computed = 10
    found = other.step(made, 6, copies=((0, 4, 10, 2), (1, 4, 3, 2)))
    np.testing.assert_allclose(found, expected(other.tokens)[10:], atol=1e-3)


def test_a_recurrent_state_is_refused_by_name(made: Backend) -> None:
    groups = (CacheGroup(kind="full", layers=(0, 1)), CacheGroup(kind="state", layers=(2,)))
    layout = KVCacheLayout(groups=groups, num_blocks=(4, 4), block_size=BLOCK, num_kv_heads=1, head_dim=HEAD_DIM)
    with pytest.raises(ConfigError, match=r"layers \(2,\) keep a recurrent state"):
        made.allocate_kv_cache(layout)
