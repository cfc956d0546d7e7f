"""What layers of one model differ in: norms, activations, rotations, windows, caps; and hidden rows as a result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from native_steps import Seq, step_input
from numpy.typing import NDArray
from probe import BLOCK, HEAD_DIM, NUM_BLOCKS, TABLE, WIDTH, activated, bound, computed, f32, tokens_of, values

from octavo.core.model_config import RopeScaling, RopeTable
from octavo.core.plan import DrawRule
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.base import Array, Ops, PositionScale, Weight
from octavo.kernels.reference.rope import attention_factor, inverse_frequencies

Doubles = NDArray[np.float64]
LINEAR, NORM, BIAS = frozenset({"linear"}), frozenset({"norm"}), frozenset({"bias"})
GREEDY = DrawRule(params=SamplingParams(temperature=0.0), random_stream=0)
PLAIN = RopeTable(theta=10_000.0, dim=HEAD_DIM)
TABLES = {
    "plain": PLAIN,
    "another theta, half of a head": RopeTable(theta=100.0, dim=HEAD_DIM // 2),
    "a quarter": RopeTable(theta=500.0, dim=4),
    "linear": RopeTable(theta=1e4, dim=HEAD_DIM, scaling=RopeScaling(kind="linear", factor=3.0)),
    "llama3": RopeTable(theta=1e4, dim=HEAD_DIM, scaling=RopeScaling(kind="llama3", factor=8.0, original_context=64)),
    "yarn": RopeTable(
        theta=1e4,
        dim=HEAD_DIM,
        scaling=RopeScaling(kind="yarn", factor=4.0, original_context=64, attention_factor=1.2),
    ),
    "longrope": RopeTable(
        theta=1e4,
        dim=HEAD_DIM,
        scaling=RopeScaling(kind="longrope", divisors=tuple(1.0 + 0.5 * i for i in range(8)), attention_factor=1.1),
    ),
}


def turned(x: Doubles, table: RopeTable) -> Doubles:
    """Each head of x [T, H * D] by its row: pairs i, i + dim / 2 of the leading dimensions."""
    heads, half = x.reshape(len(x), -1, HEAD_DIM).copy(), table.dim // 2
    angles = np.arange(len(x))[:, None, None] * inverse_frequencies(table)
    turns = (heads[..., :half] + 1j * heads[..., half : table.dim]) * np.exp(1j * angles) * attention_factor(table)
    heads[..., :half], heads[..., half : table.dim] = turns.real, turns.imag
    return heads.reshape(len(x), -1)


@pytest.mark.parametrize("num_heads", [1, 2, 4, 8])  # 32, 16, 8 and 4 dimensions: less than a register too
def test_rms_norm_of_each_head(maker: Any, tolerance: float, num_heads: int) -> None:
    gains = np.random.default_rng(2).uniform(0.5, 1.5, WIDTH // num_heads).astype(np.float32)
    found, x = computed(maker, lambda ops, x, w: ops.rms_norm(x, w["g"], 1e-5, num_heads), {"g": (f32(gains), NORM)})
    heads = x.reshape(len(x), num_heads, -1)
    wanted = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-5) * gains
    np.testing.assert_allclose(found, wanted.reshape(x.shape), atol=tolerance)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("away", [0.0, 30.0])  # rows far from zero: the mean of squares minus the square would be off
def test_layer_norm(maker: Any, tolerance: float, with_bias: bool, away: float) -> None:
    rng = np.random.default_rng(3)
    gains, bias = (rng.uniform(0.5, 1.5, WIDTH).astype(np.float32) for _ in range(2))
    ones = np.full(WIDTH, away, np.float32)
    found, x = computed(
        maker,
        lambda ops, x, w: ops.layer_norm(
            ops.linear(x, w["eye"], w["away"]), w["g"], w["b"] if with_bias else None, 1e-5
        ),
        {
            "g": (f32(gains), NORM), "b": (f32(bias), BIAS), "away": (f32(ones), BIAS),
            "eye": (f32(np.eye(WIDTH)), LINEAR),
        },
    )  # fmt: skip
    centred = x - x.mean(-1, keepdims=True)
    wanted = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * gains + (bias if with_bias else 0.0)
    np.testing.assert_allclose(found, wanted, atol=tolerance * (1 + away))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_erf"])
def test_activation(maker: Any, tolerance: float, activation: Any) -> None:
    found, x = computed(maker, lambda ops, x, w: ops.activation(ops.scale(x, 3.0), activation))
    np.testing.assert_allclose(found, activated(3.0 * x, activation), atol=tolerance)


@pytest.mark.parametrize("name", TABLES)
def test_rope_by_each_kind_of_table(maker: Any, tolerance: float, name: str) -> None:
    found, x = computed(maker, lambda ops, x, w: ops.rope(x, ops.positions, 2, TABLES[name]), count=100)
    np.testing.assert_allclose(found, turned(x, TABLES[name]), atol=2 * tolerance)


def test_rope_by_several_tables_in_one_model(maker: Any, tolerance: float) -> None:
    def call(ops: Ops, x: Array, w: Mapping[str, Weight]) -> Array:
        for table in (*TABLES.values(), *TABLES.values()):
            x = ops.rope(x, ops.positions, 2, table)
        return x

    found, x = computed(maker, call, count=40)
    for table in (*TABLES.values(), *TABLES.values()):
        x = turned(x, table)
    np.testing.assert_allclose(found, x, atol=10 * tolerance)


@pytest.mark.parametrize("scale", [PositionScale(beta=0.5, length=16), PositionScale(beta=0.1, length=8, shift=1)])
def test_scale_by_position(maker: Any, tolerance: float, scale: PositionScale) -> None:
    found, x = computed(maker, lambda ops, x, w: ops.scale_by_position(x, ops.positions, scale), count=60)
    steps = (np.arange(60) + scale.shift) // scale.length
    assert set(steps) >= {0, 1, 2, 3}
    np.testing.assert_allclose(found, x * (1 + scale.beta * np.log(1 + steps))[:, None], atol=2 * tolerance)


# Layers that differ

#: Of each layer: window, scale, soft cap, table.
LAYERS: tuple[tuple[int | None, float, float | None, RopeTable | None], ...] = (
    (5, 0.3, None, TABLES["another theta, half of a head"]),
    (None, 0.5, 2.0, None),
    (9, 0.2, 1.0, TABLES["yarn"]),
)


def qkv() -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(8)
    rows = {"q": 2 * HEAD_DIM, "k": HEAD_DIM, "v": HEAD_DIM}
    return {
        f"{part}{layer}": (rng.standard_normal((count, WIDTH)) / 4).astype(np.float32)
        for layer in range(len(LAYERS))
        for part, count in rows.items()
    }


def layered(ops: Ops, x: Array, w: Mapping[str, Weight]) -> Array:
    for layer, (window, scale, soft_cap, table) in enumerate(LAYERS):
        q, k, v = (ops.linear(x, w[f"{part}{layer}"]) for part in "qkv")
        if table is not None:
            q, k = ops.rope(q, ops.positions, 2, table), ops.rope(k, ops.positions, 1, table)
        ops.write_kv(layer, k, v)
        x = ops.add(x, ops.paged_attention(layer, q, scale=scale, window=window, soft_cap=soft_cap))
    return x


def dense(ids: list[int]) -> Doubles:
    """The same, one query and head at a time, over whole sequences."""
    x, weights = TABLE[ids].astype(np.float64), qkv()
    for layer, (window, scale, soft_cap, table) in enumerate(LAYERS):
        q, k, v = (x @ weights[f"{part}{layer}"].T.astype(np.float64) for part in "qkv")
        if table is not None:
            q, k = turned(q, table), turned(k, table)
        out = np.zeros((len(ids), 2, HEAD_DIM))
        for position in range(len(ids)):
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(2):
                scores = k[first : position + 1] @ q[position, head * HEAD_DIM :][:HEAD_DIM] * scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                shares = np.exp(scores - scores.max())
                out[position, head] = shares @ v[first : position + 1] / shares.sum()
        x = x + out.reshape(len(ids), -1)
    return x


def layered_backend(maker: Any) -> Any:
    weights = {name: (f32(array), LINEAR) for name, array in qkv().items()}
    return bound(maker, TABLE, layered, weights, num_layers=len(LAYERS))


def test_each_layer_has_its_own_window_scale_cap_and_rotation_in_any_chunks(maker: Any, tolerance: float) -> None:
    made = layered_backend(maker)
    rng = np.random.default_rng(9)
    blocks = rng.permutation(NUM_BLOCKS).tolist()
    seqs = [Seq(tokens_of(n, n), [blocks.pop() for _ in range(-(-n // BLOCK))]) for n in (3, 17, 41, 30)]
    found: list[list[Any]] = [[] for _ in seqs]
    while waiting := [i for i, seq in enumerate(seqs) if seq.computed < len(seq.tokens)]:
        chunks = [(i, min(int(rng.choice([1, 2, 9])), len(seqs[i].tokens) - seqs[i].computed)) for i in waiting]
        chunks.sort(key=lambda chunk: chunk[1] > 1)
        rows = values(made, [(seqs[i], n) for i, n in chunks])
        for i, n in chunks:
            found[i] += list(rows[:n])
            rows = rows[n:]
    for seq, got in zip(seqs, found, strict=True):
        np.testing.assert_allclose(np.array(got), dense(seq.tokens), atol=10 * tolerance)
    made.close()


# Hidden rows


@pytest.mark.parametrize("sizes", [[41], [1] * 41, [7, 1, 20, 13]])
def test_hidden_rows_are_those_of_the_reference_in_any_chunks(maker: Any, tolerance: float, sizes: list[int]) -> None:
    made, ids = layered_backend(maker), tokens_of(41, 5)
    seq, found = Seq(ids, list(range(11))), []
    for size in sizes:
        step = step_input([(seq, size)], BLOCK, logit_rows=range(size))
        out = made.run(step, [], [], hidden_rows=range(size))
        assert (out.tokens, out.row_logprobs) == ([], [])
        assert out.hidden.dtype == np.float32
        found.append(out.hidden)
        seq.computed += size
    np.testing.assert_allclose(np.concatenate(found), dense(ids), atol=10 * tolerance)
    made.close()


def test_hidden_rows_besides_draws_and_target_logprobs_change_neither(maker: Any, tolerance: float) -> None:
    made, ids = layered_backend(maker), tokens_of(10, 6)
    seq = Seq(ids, [3, 1, 2])
    plain = made.run(step_input([(seq, 10)], BLOCK, logit_rows=[9, 4]), [GREEDY], [(7, 2)])
    both = made.run(step_input([(seq, 10)], BLOCK, logit_rows=[9, 4, 6, 0]), [GREEDY], [(7, 2)], hidden_rows=[3, 0, 1])
    assert plain.hidden is None
    assert both.tokens[0].token_id == plain.tokens[0].token_id
    assert both.row_logprobs[0].logprob == pytest.approx(plain.row_logprobs[0].logprob, abs=10 * tolerance)
    np.testing.assert_allclose(both.hidden, dense(ids)[[0, 9, 4]], atol=10 * tolerance)
    made.close()


@pytest.mark.parametrize("row", [-1, 2])
def test_a_hidden_row_that_the_step_does_not_have_is_named(maker: Any, row: int) -> None:
    made = layered_backend(maker)
    step = step_input([(Seq([1, 2, 3], [0]), 3)], BLOCK, logit_rows=[2, 1])
    with pytest.raises(ValueError, match=f"hidden_rows has {row} but the step has 2 logit rows"):
        made.run(step, [GREEDY], [], hidden_rows=[row])
    made.close()
