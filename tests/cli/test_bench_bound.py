"""The bound on step times: arithmetic by hand, and figures of a real backend."""

from __future__ import annotations

import pytest

from octavo.cli.bound import decode_bound, float_rate, prefill_bound, read_rate, step_bound
from octavo.kernels.base import KVCacheLayout, MachineSpeed, ModelCost
from octavo.model import decoder
from octavo.model.registry import find_architecture
from random_model import random_source, variant

native = pytest.importorskip("octavo._native")

COST = ModelCost(
    layer_bytes=1_000_000,
    head_bytes=500_000,
    table_bytes=77,
    kv_bytes=100,
    quantised_macs=2_000_000,
    float_macs=1_000,
    head_macs=600_000,
    head_is_quantised=True,
    attention_macs=10,
    windows=(None,),
)
SPEED = MachineSpeed(
    read_bytes_per_s=((1 << 20, 9e9), (4 << 20, 3e9), (16 << 20, 4e9), (64 << 20, 2e9)),
    macs_per_s={"float32": 5e9, "int8": 20e9},
)


def test_a_decode_step_reads_the_weights_once_and_every_streams_kv() -> None:
    one, eight = (decode_bound(COST, SPEED, streams=n, context=300) for n in (1, 8))
    assert one.bytes == 1_500_000 + 300 * 100
    assert eight.bytes - one.bytes == 7 * 300 * 100
    assert one.macs == 2_000_000 + 1_000 + 600_000 + 300 * 10
    assert eight.macs == 8 * one.macs


def test_the_slower_of_memory_and_arithmetic_bounds_a_step() -> None:
    few, many = (decode_bound(COST, SPEED, streams=n, context=10) for n in (1, 64))
    assert (few.limit, few.seconds) == ("memory", few.memory_s)
    assert few.memory_s == pytest.approx((1_500_000 + 1_000) / 9e9)
    assert (many.limit, many.seconds) == ("arithmetic", many.compute_s)
    assert many.compute_s == pytest.approx(64 * (2_600_000 / 20e9 + 1_100 / 5e9))


def test_a_prefill_costs_the_same_arithmetic_in_any_chunks_and_reads_the_weights_once_a_chunk() -> None:
    whole = prefill_bound(COST, SPEED, tokens=1000, chunk=2048)
    pieces = prefill_bound(COST, SPEED, tokens=1000, chunk=300)
    assert (len(whole), len(pieces)) == (1, 4)
    assert sum(piece.macs for piece in pieces) == whole[0].macs
    kv = 100 * (300 + 600 + 900 + 1000)
    assert sum(piece.bytes for piece in pieces) == 4 * 1_000_000 + 500_000 + kv


@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize(("start", "length"), [(0, 1), (0, 30), (5, 3), (50, 20)])
def test_attention_is_charged_for_exactly_the_pairs_that_see_each_other(
    start: int, length: int, window: int | None
) -> None:
    seen = {
        (query, key)
        for query in range(start, start + length)
        for key in range(query + 1)
        if window is None or key > query - window
    }
    fields = {name: getattr(COST, name) for name in COST.__dataclass_fields__} | {"windows": (window,)}
    bound = step_bound(ModelCost(**fields), SPEED, [(start, length)], num_rows=0)
    assert bound.macs == length * (2_000_000 + 1_000) + 10 * len(seen)
    assert bound.bytes == 1_000_000 + 100 * len({key for _, key in seen})


def test_attention_is_charged_layer_by_layer() -> None:
    """Two layers of three see 7 positions: a third of K, V and pairs each."""
    fields = {name: getattr(COST, name) for name in COST.__dataclass_fields__}
    fields |= {"windows": (7, None, 7), "attention_macs": 30, "kv_bytes": 300}
    bound = step_bound(ModelCost(**fields), SPEED, [(100, 1)], num_rows=0)
    assert bound.bytes == 1_000_000 + 100 * (7 + 101 + 7)
    assert bound.macs == 2_000_000 + 1_000 + 10 * (7 + 101 + 7)


def test_a_smaller_working_set_is_never_read_slower_than_a_larger_one() -> None:
    rates = [read_rate(SPEED, size << 20) for size in (0, 1, 3, 4, 15, 16, 63, 64, 500)]
    assert rates == [9e9, 9e9, 9e9, 4e9, 4e9, 4e9, 4e9, 2e9, 2e9]


def test_float_products_run_at_the_best_float_rate_and_quantised_ones_at_any() -> None:
    amx = MachineSpeed(read_bytes_per_s=SPEED.read_bytes_per_s, macs_per_s={**SPEED.macs_per_s, "bf16": 80e9})
    assert (float_rate(SPEED), float_rate(amx)) == (5e9, 80e9)
    assert step_bound(COST, amx, [(0, 1)], num_rows=0).compute_s == pytest.approx((2_001_000 + 10) / 80e9)


@pytest.mark.parametrize("tied", [True, False])
def test_the_native_backend_tells_the_bytes_and_products_of_the_weights_it_packed(tied: bool) -> None:
    from octavo.kernels.native.backend import NativeBackend

    config = variant(tied_embeddings=tied)
    backend = NativeBackend(config, threads=1)
    try:
        decoder.load(random_source(config), backend)
        cost = backend.model_cost()
        specs = find_architecture("llama").tensors(config)
        macs = {name: s.shape[0] * s.shape[1] for name, s in specs.items() if s.uses & {"linear", "head"}}
        head = "embedding.weight" if tied else "head.weight"
        assert cost.head_macs == macs.pop(head)
        assert (cost.float_macs, cost.quantised_macs) == (sum(macs.values()), 0)  # random_source is float32
        rounded_up = 16 * -(-config.vocab_size // 16) * config.hidden_size * 4
        assert cost.head_bytes >= rounded_up
        assert (cost.table_bytes > 0) != tied
        norms = sum(s.shape[0] for s in specs.values() if len(s.shape) == 1)
        assert cost.layer_bytes >= 4 * (sum(macs.values()) + norms)
        layout = KVCacheLayout.full(num_layers=2, num_blocks=3, block_size=4, num_kv_heads=2, head_dim=16)
        assert backend.allocate_kv_cache(layout) == cost.kv_bytes * 3 * 4
    finally:
        backend.close()


@pytest.mark.parametrize("isa", native.available_isas())
def test_every_instruction_set_is_measured(isa: str) -> None:
    rates = dict(native.multiply_add_rates(native.Context(1, isa), 0.01))
    assert {"float32", "int8"} <= rates.keys()
    assert all(1e7 < rate < 1e15 for rate in rates.values())


def test_memory_is_measured_per_working_set_and_small_ones_are_refused() -> None:
    context = native.Context(2, "generic")
    rates = native.read_bandwidths(context, [1 << 20, 3 << 20], 0.005)
    assert len(rates) == 2
    assert all(1e7 < rate < 1e13 for rate in rates)
    with pytest.raises(ValueError, match="at least 1 MiB"):
        native.read_bandwidths(context, [1000], 0.005)
