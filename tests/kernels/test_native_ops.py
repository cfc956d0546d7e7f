"""Each native op on every ISA of this host: close to the written-out formula, and the same bits on all of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from native_models import (
    ENCODINGS,
    ISAS,
    QUANTISED,
    OpModel,
    allocate,
    backend,
    config,
    random_tensor,
    to_bfloat16,
    whole,
)
from native_steps import Seq, step_input
from numpy.typing import NDArray

from octavo.core.errors import ConfigError
from octavo.core.model_config import RopeScaling, RopeTable
from octavo.kernels.base import Array, Ops, PositionScale
from octavo.kernels.native.backend import Activations, NativeBackend
from octavo.kernels.reference.rope import rotation_table
from octavo.weights.blocks import TAKE_APART
from octavo.weights.dequantise import GROUP_LAYOUT, Encoding
from octavo.weights.tensor import WeightTensor

Floats = NDArray[np.float32]
ROWS = 117  # every row is one token of one sequence


def run_op(
    isa: str,
    table: Floats,
    prepare: Callable[[NativeBackend], Callable[[Ops, Array], Array]],
    activations: Activations = "int8",
    **changes: object,
) -> Floats:
    """The result [rows, width] of an op applied to the rows of ``table``, the rows being positions 0, 1, ..."""
    c = config(vocab_size=len(table), **changes)
    made = backend(c, isa, activations=activations)
    allocate(made, c)
    made.bind(OpModel(made, c, table, prepare(made)), max_tokens=len(table), max_seqs=1)
    seq = Seq(list(range(len(table))), list(range(64)))
    every = list(range(len(table)))
    made.run(step_input([(seq, len(table))], 16, logit_rows=every), [], [(0, 0)] * len(table))
    built = made._built
    result: Floats = built.program.read(built.hidden, len(table))
    made.close()
    return result


def check(
    table: Floats,
    prepare: Callable[..., Callable[[Ops, Array], Array]],
    wanted: NDArray[np.float64],
    atol: float,
    **changes: object,
) -> None:
    """All ISAs agree bit for bit, and with ``wanted`` within ``atol``."""
    results = [run_op(isa, table, prepare, **changes) for isa in ISAS]
    assert np.abs(results[0] - wanted).max() <= atol
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def rows(width: int, scale: float = 1.0, seed: int = 1) -> Floats:
    return (scale * np.random.default_rng(seed).normal(size=(ROWS, width))).astype(np.float32)


@pytest.mark.parametrize("width", [1, 15, 16, 61, 576])
def test_rms_norm_follows_its_formula(width: int) -> None:
    x, weight = rows(width), random_tensor(np.random.default_rng(2), (width,))
    x64 = x.astype(np.float64)
    wanted = x64 / np.sqrt((x64**2).mean(1, keepdims=True) + 1e-5) * weight.to_float32()

    def prepare(made: NativeBackend) -> Callable[[Ops, Array], Array]:
        packed = made.pack(weight, frozenset({"norm"}))
        return lambda ops, x: ops.rms_norm(x, packed, 1e-5)

    check(x, prepare, wanted, 2e-5)


@pytest.mark.parametrize(("num_heads", "head_dim"), [(3, 16), (5, 61), (4, 1), (7, 24)])
def test_rms_norm_of_heads_follows_its_formula(num_heads: int, head_dim: int) -> None:
    x, weight = rows(num_heads * head_dim), random_tensor(np.random.default_rng(2), (head_dim,))
    heads = x.astype(np.float64).reshape(ROWS, num_heads, head_dim)
    wanted = heads / np.sqrt((heads**2).mean(2, keepdims=True) + 1e-5) * weight.to_float32()

    def prepare(made: NativeBackend) -> Callable[[Ops, Array], Array]:
        packed = made.pack(weight, frozenset({"norm"}))
        return lambda ops, x: ops.rms_norm(x, packed, 1e-5, num_heads)

    check(x, prepare, wanted.reshape(ROWS, -1), 2e-5)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("width", [1, 15, 16, 61, 576])
def test_layer_norm_follows_its_formula(width: int, with_bias: bool) -> None:
    x = rows(width) + np.float32(5.0)
    weight, bias = (random_tensor(np.random.default_rng(seed), (width,)) for seed in (2, 3))
    centred = x.astype(np.float64) - x.astype(np.float64).mean(1, keepdims=True)
    wanted = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * weight.to_float32()

    def prepare(made: NativeBackend) -> Callable[[Ops, Array], Array]:
        gains, offsets = made.pack(weight, frozenset({"norm"})), made.pack(bias, frozenset({"bias"}))
        return lambda ops, x: ops.layer_norm(x, gains, offsets if with_bias else None, 1e-5)

    check(x, prepare, wanted + (bias.to_float32() if with_bias else 0.0), 2e-5)


def activated(x: NDArray[np.float64], activation: str) -> NDArray[np.float64]:
    if activation == "silu":
        return x / (1 + np.exp(-x))
    if activation == "gelu":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_erf"])
def test_gated_mul_follows_its_formula(activation: str) -> None:
    x = rows(61, scale=4.0)
    gate, up = x.astype(np.float64), 0.5 * x.astype(np.float64)
    wanted = activated(gate, activation) * up
    check(x, lambda made: lambda ops, x: ops.gated_mul(x, ops.scale(x, 0.5), activation), wanted, 1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_erf"])
def test_activation_follows_its_formula(activation: str) -> None:
    x = rows(61, scale=4.0)
    x[0, :8] = [0.0, -0.0, 1e-30, -1e-30, 60.0, -60.0, 1e4, -1e4]
    wanted = activated(x.astype(np.float64).clip(-700, None), activation)
    check(x, lambda made: lambda ops, x: ops.activation(x, activation), wanted, 2e-6)


def test_gelu_keeps_what_is_left_of_negative_numbers() -> None:
    """gelu(-4) is -1.3e-4: formed as x (1 + erf) / 2 in float32 it would have three digits."""
    x = np.linspace(-5.0, -1.0, ROWS * 16).astype(np.float32).reshape(ROWS, 16)
    wanted = x * np.vectorize(math.erfc)(-x.astype(np.float64) / np.sqrt(2)) / 2
    check(x, lambda made: lambda ops, x: ops.activation(x, "gelu_erf"), wanted, 3e-7)
    found = run_op("", x, lambda made: lambda ops, x: ops.activation(x, "gelu_erf"))
    assert np.abs(found / wanted - 1).max() < 2e-3


def test_add_and_scale_are_exact() -> None:
    x = rows(33)
    check(x, lambda made: lambda ops, x: ops.add(ops.scale(x, -3.0), x), (np.float32(-3.0) * x + x).astype(float), 0.0)


@pytest.mark.parametrize(("head_dim", "rope_dim"), [(64, 64), (16, 16), (20, 12), (48, 20), (80, 32)])
def test_rope_turns_each_pair_by_its_position(head_dim: int, rope_dim: int) -> None:
    x = rows(3 * head_dim)
    c = config(head_dim=head_dim, rope_dim=rope_dim)
    cos, sin = (t[:, None, :].astype(np.float64) for t in rotation_table(c.ropes[0], ROWS))
    heads = x.astype(np.float64).reshape(ROWS, 3, head_dim)
    wanted, half = heads.copy(), rope_dim // 2
    a, b = heads[:, :, :half], heads[:, :, half:rope_dim]
    wanted[:, :, :half], wanted[:, :, half:rope_dim] = a * cos - b * sin, b * cos + a * sin
    check(
        x,
        lambda made: lambda ops, x: ops.rope(x, ops.positions, 3, c.ropes[0]),
        wanted.reshape(ROWS, -1),
        2e-6,
        head_dim=head_dim,
        rope_dim=rope_dim,
    )


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling(kind="yarn", factor=4.0, original_context=32, attention_factor=1.25),
        RopeScaling(kind="longrope", divisors=(1.0, 1.5, 3.0), attention_factor=0.9),
    ],
    ids=lambda scaling: scaling.kind,
)
def test_rope_multiplies_by_the_attention_factor_of_its_table(scaling: RopeScaling) -> None:
    x = rows(3 * 20)
    table = RopeTable(theta=1e4, dim=6, scaling=scaling)
    cos, sin = (t[:, None, :].astype(np.float64) for t in rotation_table(table, ROWS))
    heads = x.astype(np.float64).reshape(ROWS, 3, 20)
    wanted, a, b = heads.copy(), heads[:, :, :3], heads[:, :, 3:6]
    wanted[:, :, :3], wanted[:, :, 3:6] = a * cos - b * sin, b * cos + a * sin
    check(x, lambda made: lambda ops, x: ops.rope(x, ops.positions, 3, table), wanted.reshape(ROWS, -1), 2e-6,
          head_dim=20)  # fmt: skip


def test_scale_by_position_follows_its_formula() -> None:
    x, scale = rows(33), PositionScale(beta=0.25, length=10, shift=1)
    factors = 1 + 0.25 * np.log(1 + (np.arange(ROWS) + 1) // 10)
    check(x, lambda made: lambda ops, x: ops.scale_by_position(x, ops.positions, scale), x * factors[:, None], 2e-6)


#: encoding -> largest error allowed of a product of unit-variance rows, by K = 96. int8 activations cost the most.
LINEAR_TOLERANCE: dict[Encoding, float] = {e: 0.06 if e in QUANTISED else 2e-6 for e in ENCODINGS}
#: Bytes of a block that are f16 scales, where they are not the first ones.
SCALE_BYTES: dict[Encoding, range] = {
    "Q2_K": range(80, 84), "Q3_K": range(108, 110), "Q6_K": range(208, 210), "TQ2_0": range(64, 66),
}  # fmt: skip


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("num_out", [1, 16, 83])
def test_linear_multiplies_by_the_dequantised_weights(encoding: Encoding, num_out: int) -> None:
    width = whole(encoding, 96)
    x, weight = rows(width), random_tensor(np.random.default_rng(3), (num_out, width), encoding)
    bias = random_tensor(np.random.default_rng(4), (num_out,))
    wanted = x.astype(np.float64) @ weight.to_float32().T.astype(np.float64) + bias.to_float32()

    def prepare(made: NativeBackend) -> Callable[[Ops, Array], Array]:
        packed, packed_bias = made.pack(weight, frozenset({"linear"})), made.pack(bias, frozenset({"bias"}))
        return lambda ops, x: ops.linear(x, packed, packed_bias)

    check(x, prepare, wanted, LINEAR_TOLERANCE[encoding])


@pytest.mark.parametrize("encoding", [e for e in ENCODINGS if e in QUANTISED])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 13, 41])
def test_integer_products_equal_the_written_out_arithmetic_bit_for_bit(encoding: Encoding, num_rows: int) -> None:
    """docs/kernels.md: quantise per group of 32, exact integer sums, one float32 order over the groups."""
    width = whole(encoding, 64) + whole(encoding, 32) + (512 if num_rows > 7 else 0)  # many rows: 16 groups at a time
    x, weight = rows(width)[:num_rows], random_tensor(np.random.default_rng(5), (48, width), encoding)

    def prepare(made: NativeBackend) -> Callable[[Ops, Array], Array]:
        packed = made.pack(weight, frozenset({"linear"}))
        return lambda ops, x: ops.linear(x, packed)

    wanted = _integer_product(x, weight)
    for isa in ISAS:
        np.testing.assert_array_equal(run_op(isa, x, prepare), wanted)


@pytest.mark.parametrize("encoding", [e for e in ENCODINGS if e in QUANTISED])
def test_the_largest_integers_overflow_no_sum(encoding: Encoding) -> None:
    """All bits set or none, rows of the largest magnitude: 16-bit sums are at their limit."""
    width = whole(encoding, 64)
    x = np.where(np.arange(3 * width).reshape(3, width) % 3 == 0, -1, 1).astype(np.float32)
    x[0], x[1] = 1, -1
    data = random_tensor(np.random.default_rng(5), (48, width), encoding).data.reshape(48, -1).copy()
    blocks = data.reshape(-1, GROUP_LAYOUT[encoding][1])
    kept = random_tensor(np.random.default_rng(5), (48, width), encoding).data.reshape(blocks.shape)
    blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :] = 0, 255
    for at in SCALE_BYTES.get(encoding, range(4 if encoding in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 2)):
        blocks[:, at] = kept[:, at]
    weight = WeightTensor(name="w", shape=(48, width), encoding=encoding, data=blocks.reshape(-1))

    def prepare(made: NativeBackend) -> Callable[[Ops, Array], Array]:
        packed = made.pack(weight, frozenset({"linear"}))
        return lambda ops, x: ops.linear(x, packed)

    wanted = _integer_product(x, weight)
    for isa in ISAS:
        np.testing.assert_array_equal(run_op(isa, x, prepare), wanted)


@pytest.mark.parametrize("encoding", [e for e in ENCODINGS if e not in ("F32", "F16")])
@pytest.mark.parametrize(
    ("num_rows", "num_out", "width"),
    [(1, 48, 64), (5, 35, 64), (17, 48, 96), (40, 35, 672), (64, 16, 64), (117, 64, 32)],
)
def test_bfloat16_products_equal_the_written_out_arithmetic_bit_for_bit(
    encoding: Encoding, num_rows: int, num_out: int, width: int
) -> None:
    """docs/kernels.md: both sides are rounded; per 32 k, an even and an odd chain from 0, summed, then added."""
    width = whole(encoding, width)
    x, weight = rows(width)[:num_rows], random_tensor(np.random.default_rng(5), (num_out, width), encoding)

    def prepare(made: NativeBackend) -> Callable[[Ops, Array], Array]:
        packed = made.pack(weight, frozenset({"linear"}))
        return lambda ops, x: ops.linear(x, packed)

    wanted = _bfloat16_product(x, weight.to_float32())
    for isa in ISAS:
        np.testing.assert_array_equal(run_op(isa, x, prepare, "bf16"), wanted)


@pytest.mark.parametrize("width", [1, 33, 61])
def test_bfloat16_weights_of_any_width_meet_bfloat16_rows(width: int) -> None:
    x, weight = rows(width), random_tensor(np.random.default_rng(5), (19, width), "BF16")
    padding = [(0, 0), (0, -width % 32)]
    wanted = _bfloat16_product(np.pad(x, padding), np.pad(weight.to_float32(), padding))

    def prepare(made: NativeBackend) -> Callable[[Ops, Array], Array]:
        packed = made.pack(weight, frozenset({"linear"}))
        return lambda ops, x: ops.linear(x, packed)

    for isa in ISAS:
        np.testing.assert_array_equal(run_op(isa, x, prepare, "bf16"), wanted)


def test_rounding_to_bfloat16_takes_denormals_for_zero() -> None:
    """The largest would round up to a normal number, which the instructions of AVX512_BF16 do not do."""
    bits = np.uint32([0x007FFFFF, 0x007F8000, 0x807FFFFF, 0x007F7FFF, 0x00000001, 0x80000000, 0x00800000, 0x80800001])
    x = np.zeros((ROWS, 32), np.float32)
    x[:, : len(bits)] = bits.view(np.float32)
    ones = (np.eye(32, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    weight = WeightTensor(name="w", shape=(32, 32), encoding="BF16", data=ones.reshape(-1).view(np.uint8))

    def prepare(made: NativeBackend) -> Callable[[Ops, Array], Array]:
        packed = made.pack(weight, frozenset({"linear"}))
        return lambda ops, x: ops.linear(x, packed)

    wanted = np.where(np.abs(x) < 2.0**-126, 0.0, to_bfloat16(x))
    for isa in ISAS:
        np.testing.assert_array_equal(run_op(isa, x, prepare, "bf16"), wanted)


@pytest.mark.parametrize("encoding", ["BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("num_rows", [8, 9])
def test_by_rows_takes_int8_for_eight_rows_and_bfloat16_for_more(encoding: Encoding, num_rows: int) -> None:
    x, weight = rows(64)[:num_rows], random_tensor(np.random.default_rng(5), (48, 64), encoding)

    def prepare(made: NativeBackend) -> Callable[[Ops, Array], Array]:
        packed = made.pack(weight, frozenset({"linear"}))
        return lambda ops, x: ops.linear(x, packed)

    chosen = "int8" if num_rows <= 8 and encoding != "BF16" else "bf16"
    np.testing.assert_array_equal(run_op("", x, prepare, "by rows"), run_op("", x, prepare, chosen))


def _bfloat16_product(x: Floats, weight: Floats) -> Floats:
    a, b = to_bfloat16(x), to_bfloat16(weight)
    acc = np.zeros((len(a), len(b)), np.float32)
    for start in range(0, a.shape[1], 32):
        chains = np.zeros((2, *acc.shape), np.float32)
        for k in range(start, start + 32):
            chains[k % 2] = _fma(a[:, k, None], b[None, :, k], chains[k % 2])
        acc += chains[0] + chains[1]
    return acc


def _integer_product(x: Floats, weight: WeightTensor) -> Floats:
    """Blocks are taken apart by the reference decoding, which other tests hold against the gguf package."""
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(2)
    scale = largest * np.float32(1 / 127)
    q = np.rint(groups * (np.float32(127) / largest)[:, :, None]).astype(np.int64)
    blocks = TAKE_APART[weight.encoding](weight.data.reshape(-1, GROUP_LAYOUT[weight.encoding][1]))
    subs = blocks.d if blocks.sub is None else blocks.d * blocks.sub  # [blocks, sub-scales]
    parts = 2 if subs.shape[1] == 16 or weight.encoding in ("IQ2_XS", "TQ2_0") else 1  # scales per group of 32
    per_block = blocks.q.shape[1] // 32 * parts
    d = subs.repeat(per_block // subs.shape[1], axis=1).reshape(weight.shape[0], groups.shape[1], parts)
    w = blocks.q.astype(np.int64).reshape(weight.shape[0], groups.shape[1], parts, -1)
    minimum = None if blocks.minimum is None else blocks.minimum.reshape(d.shape)
    if weight.encoding == "Q4_0":  # the zero point takes the way of a minimum
        w, minimum = w + 8, -8 * d
    q = q.reshape(len(x), groups.shape[1], parts, -1)
    sums = scale[:, :, None] * q.sum(3).astype(np.float32)
    acc = np.zeros((len(x), weight.shape[0]), np.float32)
    for g in range(groups.shape[1]):
        for part in range(parts):
            product = (q[:, g, part] @ w[:, g, part].T).astype(np.float32) * scale[:, g, None]
            acc = _fma(product, d[None, :, g, part], acc)
        for part in range(parts if minimum is not None else 0):
            acc = _fma(sums[:, g, part, None], minimum[None, :, g, part], acc)
    return acc


def _fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c rounded once: the product is exact in float64, and extended precision absorbs the second rounding."""
    return (a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)).astype(np.float32)


def test_a_model_that_does_not_fit_its_weights_is_refused_when_bound() -> None:
    c = config()
    made = backend(c)
    packed = made.pack(random_tensor(np.random.default_rng(0), (8, 32)), frozenset({"linear"}))
    model = OpModel(made, c, rows(16), lambda ops, x: ops.linear(x, packed))
    with pytest.raises(ConfigError, match="input has 16 columns but must have 32"):
        made.bind(model, max_tokens=8, max_seqs=1)
