"""What any backend must do: each op against the written-out formula, the paged cache, copies, draws, rows that fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from backends import QUANTISED_TOLERANCE
from extreme_draws import rules
from native_models import ENCODINGS, random_tensor
from native_steps import Seq, step_input
from numpy.typing import NDArray
from probe import (
    BLOCK,
    HEAD_DIM,
    NUM_BLOCKS,
    TABLE,
    VOCAB,
    WIDTH,
    Call,
    activated,
    bound,
    computed,
    config,
    f32,
    logprobs,
    table_of,
    tokens_of,
    values,
)

from octavo.core.errors import ConfigError
from octavo.core.plan import DrawRule
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.base import Array, Backend, Draw, DrawMasks, KVCacheLayout, Ops, Weight
from octavo.kernels.reference import sampling as reference
from octavo.kernels.reference.rope import inverse_frequencies
from octavo.weights.dequantise import GROUP_LAYOUT, Encoding

Doubles = NDArray[np.float64]
LINEAR, NORM, BIAS = frozenset({"linear"}), frozenset({"norm"}), frozenset({"bias"})


# Ops


def test_embedding_takes_rows_and_the_head_their_products(maker: Any, tolerance: float) -> None:
    found, x = computed(maker, lambda ops, x, w: x)
    np.testing.assert_allclose(found, x, atol=tolerance)


def test_rms_norm(maker: Any, tolerance: float) -> None:
    gains = np.random.default_rng(2).uniform(0.5, 1.5, WIDTH).astype(np.float32)
    found, x = computed(maker, lambda ops, x, w: ops.rms_norm(x, w["g"], 1e-5), {"g": (f32(gains), NORM)})
    wanted = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * gains
    np.testing.assert_allclose(found, wanted, atol=tolerance)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("encoding", [e for e in ENCODINGS if GROUP_LAYOUT[e][0] <= WIDTH])
def test_linear_with_weights_of_every_format(maker: Any, tolerance: float, encoding: Encoding, with_bias: bool) -> None:
    tensor = random_tensor(np.random.default_rng(3), (WIDTH, WIDTH), encoding)
    bias = np.random.default_rng(4).standard_normal(WIDTH).astype(np.float32)
    found, x = computed(
        maker,
        lambda ops, x, w: ops.linear(x, w["w"], w["b"] if with_bias else None),
        {"w": (tensor, LINEAR), "b": (f32(bias), BIAS)},
    )
    wanted = x @ tensor.to_float32().T.astype(np.float64) + (bias if with_bias else 0.0)
    is_quantised = GROUP_LAYOUT[encoding][0] > 1
    np.testing.assert_allclose(found, wanted, atol=QUANTISED_TOLERANCE if is_quantised else 5 * tolerance)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_erf"])
def test_gated_mul(maker: Any, tolerance: float, activation: Any) -> None:
    a, b = (np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 6 for seed in (5, 6))
    found, x = computed(
        maker,
        lambda ops, x, w: ops.gated_mul(ops.linear(x, w["a"]), ops.linear(x, w["b"]), activation),
        {"a": (f32(a), LINEAR), "b": (f32(b), LINEAR)},
    )
    gate, up = x @ a.T.astype(np.float64), x @ b.T.astype(np.float64)
    np.testing.assert_allclose(found, activated(gate, activation) * up, atol=2 * tolerance)


def test_add_and_scale(maker: Any, tolerance: float) -> None:
    found, x = computed(maker, lambda ops, x, w: ops.add(ops.scale(x, 0.5), x))
    np.testing.assert_allclose(found, 1.5 * x, atol=tolerance)


@pytest.mark.parametrize("rope_dim", [HEAD_DIM, HEAD_DIM // 2])
def test_rope(maker: Any, tolerance: float, rope_dim: int) -> None:
    found, x = computed(maker, lambda ops, x, w: ops.rope(x, ops.positions, 2, config(rope_dim=rope_dim).ropes[0]))
    np.testing.assert_allclose(found, turned(x, range(len(x)), rope_dim), atol=tolerance)


def turned(x: Doubles, positions: Any, rope_dim: int = HEAD_DIM) -> Doubles:
    """Each head of x [T, H * D]: pairs i, i + rope_dim / 2."""
    heads, half = x.reshape(len(x), -1, HEAD_DIM).copy(), rope_dim // 2
    for row, position in enumerate(positions):
        for pair, frequency in enumerate(inverse_frequencies(config(rope_dim=rope_dim).ropes[0])):
            pairs = heads[row, :, pair] + 1j * heads[row, :, pair + half]
            result = pairs * np.exp(1j * position * float(frequency))
            heads[row, :, pair], heads[row, :, pair + half] = result.real, result.imag
    return heads.reshape(len(x), -1)


def test_logits_are_capped_softly(maker: Any, tolerance: float) -> None:
    made = bound(maker, TABLE, lambda ops, x, w: x, soft_cap=1.5)
    ids = tokens_of(9)
    found = logprobs(made, [(Seq(ids, [0, 1, 2]), 9)])
    capped = 1.5 * np.tanh(np.pad(TABLE[ids].astype(np.float64), ((0, 0), (0, 1))) / 1.5)
    wanted = capped - np.log(np.exp(capped).sum(-1, keepdims=True))
    np.testing.assert_allclose(found, wanted, atol=tolerance)
    made.close()


def test_a_cap_far_below_its_logits_is_what_they_become(maker: Any, tolerance: float) -> None:
    """tanh(x) is 1, whatever e^(2 x) does in float32."""
    made = bound(maker, np.float32(1000.0) * TABLE, lambda ops, x, w: x, soft_cap=1.0)
    ids = tokens_of(9)
    capped = np.tanh(1000.0 * np.pad(TABLE[ids].astype(np.float64), ((0, 0), (0, 1))))
    wanted = capped - np.log(np.exp(capped).sum(-1, keepdims=True))
    np.testing.assert_allclose(logprobs(made, [(Seq(ids, [0, 1, 2]), 9)]), wanted, atol=tolerance)
    made.close()


# The paged cache


def attention(window: int | None, soft_cap: float | None) -> Call:
    def call(ops: Ops, x: Array, w: Mapping[str, Weight]) -> Array:
        k, v = ops.rope(ops.linear(x, w["k"]), ops.positions, 1, config().ropes[0]), ops.linear(x, w["v"])
        ops.write_kv(0, k, v)
        q = ops.rope(ops.linear(x, w["q"]), ops.positions, 2, config().ropes[0])
        return ops.paged_attention(0, q, scale=0.3, window=window, soft_cap=soft_cap)

    return call


def qkv() -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(8)
    rows = {"q": 2 * HEAD_DIM, "k": HEAD_DIM, "v": HEAD_DIM}
    return {name: (rng.standard_normal((count, WIDTH)) / 4).astype(np.float32) for name, count in rows.items()}


def packed_qkv() -> Any:
    return {name: (f32(array), LINEAR) for name, array in qkv().items()}


def dense(ids: list[int], window: int | None, soft_cap: float | None) -> Doubles:
    """Attention of every position over those before it, one query and head at a time."""
    x, w = TABLE[ids].astype(np.float64), qkv()
    q, k, v = (x @ w[name].T.astype(np.float64) for name in "qkv")
    q, k = turned(q, range(len(ids))), turned(k, range(len(ids)))
    out = np.zeros((len(ids), 2, HEAD_DIM))
    for position in range(len(ids)):
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(2):
            scores = k[first : position + 1] @ q[position, head * HEAD_DIM :][:HEAD_DIM] * 0.3
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores - scores.max())
            out[position, head] = weights @ v[first : position + 1] / weights.sum()
    return out.reshape(len(ids), -1)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 7, 1000])
def test_paged_attention_is_dense_attention_in_any_chunks_company_and_blocks(
    maker: Any, tolerance: float, window: int | None, soft_cap: float | None
) -> None:
    made = bound(maker, TABLE, attention(window, soft_cap), packed_qkv())
    rng = np.random.default_rng(9)
    blocks = rng.permutation(NUM_BLOCKS).tolist()
    lengths = (3, 17, 41, 1, 30)
    seqs = [Seq(tokens_of(n, n), [blocks.pop() for _ in range(-(-n // BLOCK))]) for n in lengths]
    found: list[list[Any]] = [[] for _ in seqs]
    while waiting := [i for i, seq in enumerate(seqs) if seq.computed < len(seq.tokens)]:
        chosen = rng.choice(waiting, int(rng.integers(1, len(waiting) + 1)), replace=False)
        chunks = [(int(i), min(int(rng.choice([1, 1, 2, 9])), len(seqs[i].tokens) - seqs[i].computed)) for i in chosen]
        chunks.sort(key=lambda chunk: chunk[1] > 1)
        rows = values(made, [(seqs[i], n) for i, n in chunks])
        for i, n in chunks:
            found[i] += list(rows[:n])
            rows = rows[n:]
    for seq, got in zip(seqs, found, strict=True):
        np.testing.assert_allclose(np.array(got), dense(seq.tokens, window, soft_cap), atol=5 * tolerance)
    made.close()


def test_a_copied_block_goes_on_like_its_source_and_only_its_head_is_copied(maker: Any, tolerance: float) -> None:
    made = bound(maker, TABLE, attention(None, None), packed_qkv())
    ids = tokens_of(20)
    source = Seq(ids, [5, 9, 2, 7, 11])
    values(made, [(source, 11)])
    other = Seq(
        ids[:10] + tokens_of(10, 4), [5, 9, 30, 31, 32], computed=10
    )  # shares two blocks, parts inside the third
    values(made, [(Seq(tokens_of(12, 6), [40, 41, 30]), 12)])  # what lay in block 30 before
    found = values(made, [(other, 10)], copies=[(0, 2, 30, 2)])
    np.testing.assert_allclose(found, dense(other.tokens, None, None)[10:], atol=5 * tolerance)
    found = values(made, [(source, 9)])
    np.testing.assert_allclose(found, dense(ids, None, None)[11:], atol=5 * tolerance)
    made.close()


def test_slot_minus_one_writes_nothing(maker: Any, tolerance: float) -> None:
    made = bound(maker, TABLE, attention(None, None), packed_qkv())
    ids = tokens_of(8)
    seq = Seq(ids, [3, 4])
    values(made, [(seq, 7)])
    step = step_input([(Seq(tokens_of(7, 9), [3, 4]), 7)], BLOCK)
    step.slot_mapping[:] = -1
    made.run(step, [DrawRule(params=SamplingParams(temperature=0.0), random_stream=0)])
    np.testing.assert_allclose(values(made, [(seq, 1)]), dense(ids, None, None)[7:], atol=5 * tolerance)
    made.close()


def test_the_cache_has_the_size_that_was_said(maker: Any) -> None:
    made = maker(config())
    said = made.kv_bytes_per_token(config(), 1)
    layout = KVCacheLayout.full(
        num_layers=1, num_blocks=NUM_BLOCKS, block_size=BLOCK, num_kv_heads=1, head_dim=HEAD_DIM
    )
    assert made.allocate_kv_cache(layout) == said * NUM_BLOCKS * BLOCK
    made.close()


def test_a_cache_that_does_not_fit_is_refused(maker: Any) -> None:
    made = maker(config())
    huge = KVCacheLayout.full(num_layers=80, num_blocks=1 << 40, block_size=16, num_kv_heads=8, head_dim=128)
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        made.allocate_kv_cache(huge)
    made.close()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_packing_takes_no_more_than_was_said(maker: Any, encoding: Encoding) -> None:
    made = maker(config())
    said = made.weight_bytes((WIDTH, max(WIDTH, GROUP_LAYOUT[encoding][0])), encoding, LINEAR)
    assert 0 <= said.packed <= said.loading
    made.close()


# Draws


def echo(maker: Any, table: NDArray[np.float32]) -> Backend:
    """The logits of a token are its row of ``table`` and 0."""
    return bound(maker, table, lambda ops, x, w: x)


def test_draws_are_those_of_the_reference(maker: Any) -> None:
    rng = np.random.default_rng(11)
    table = (3 * rng.standard_normal((VOCAB, WIDTH))).astype(np.float32)
    made = echo(maker, table)
    near = 0
    for seed in range(40):
        draws = [rule for rule in rules(seed, 8) if fits(rule)]
        seqs = [Seq(tokens_of(1 + i % 3, 100 * seed + i), [i]) for i in range(len(draws))]
        chunks = sorted(zip(seqs, draws, strict=True), key=lambda pair: len(pair[0].tokens) > 1)
        step = step_input([(seq, len(seq.tokens)) for seq, _ in chunks], BLOCK)
        tokens = made.run(step, [rule for _, rule in chunks]).tokens
        for (seq, rule), got in zip(chunks, tokens, strict=True):
            logits = np.append(table[seq.tokens[-1]], np.float32(0.0))
            wanted = reference.sample(logits, Draw.at(rule, len(seq.tokens)))
            if isinstance(wanted, str) or isinstance(got, str):
                assert got == wanted, rule
            elif got.token_id != wanted.token_id:
                near += 1  # a sum that lies at a boundary
            else:
                assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)
    assert near <= 2
    made.close()


def fits(rule: DrawRule) -> bool:
    """Whether its token ids are in this vocabulary."""
    lists = (*rule.banned_token_ids, *rule.history, *(rule.params.allowed_token_ids or ()), *rule.params.stop_token_ids)
    bias, words = [t for t, _ in rule.params.logit_bias], [t for word in rule.params.bad_words_token_ids for t in word]
    return max([0, *lists, *bias, *words, *rule.params.dry_sequence_breaker_ids]) < VOCAB


def test_a_row_that_is_not_finite_fails_its_own_draw_alone(maker: Any) -> None:
    table = table_of(12)
    table[7, 3] = np.nan
    made = echo(maker, table)
    seqs = [Seq([token], [i]) for i, token in enumerate((1, 7, 2))]
    rule = DrawRule(params=SamplingParams(temperature=0.0), random_stream=0)
    tokens = made.run(step_input([(seq, 1) for seq in seqs], BLOCK), [rule] * 3).tokens
    assert [token if isinstance(token, str) else "" for token in tokens] == ["", "not_finite", ""]
    made.close()


def test_masks_that_leave_nothing_fail_their_own_draw_alone(maker: Any) -> None:
    made = echo(maker, table_of(13))
    free = DrawRule(params=SamplingParams(temperature=0.0), random_stream=0)
    masked = DrawRule(params=SamplingParams(allowed_token_ids=(3,)), random_stream=0, banned_token_ids=(3,))
    seqs = [Seq([token], [i]) for i, token in enumerate((1, 2, 3))]
    tokens = made.run(step_input([(seq, 1) for seq in seqs], BLOCK), [free, masked, free]).tokens
    assert [token if isinstance(token, str) else "" for token in tokens] == ["", "no_token_left", ""]
    made.close()


def random_bits(rng: np.random.Generator, count: int) -> NDArray[np.uint32]:
    """Masks that allow many tokens, few, one or none."""
    bits = rng.integers(0, 1 << 32, (count, -(-VOCAB // 32)), dtype=np.uint32)
    kinds = rng.integers(0, 5, count)
    bits[kinds == 1] &= rng.integers(0, 1 << 32, bits.shape[1], dtype=np.uint32)
    bits[kinds == 2] = 0
    bits[kinds == 3] = 0xFFFFFFFF
    bits[kinds == 4] = 0
    bits[kinds == 4, 0] = 1 << 7
    return bits


def filled_with(draws: list[int], bits: NDArray[np.uint32]) -> DrawMasks:
    def fill(rows: NDArray[np.uint32]) -> None:
        assert not rows.any()
        rows[:] = bits

    return DrawMasks(draws, fill)


def test_masked_draws_are_those_of_the_reference(maker: Any) -> None:
    rng = np.random.default_rng(14)
    table = (3 * rng.standard_normal((VOCAB, WIDTH))).astype(np.float32)
    made = echo(maker, table)
    near, none_left = 0, 0
    for seed in range(60):
        draws = [rule for rule in rules(seed, 8) if fits(rule)]
        seqs = [Seq(tokens_of(1, 100 * seed + i), [i]) for i in range(len(draws))]
        masked = sorted(rng.choice(len(draws), int(rng.integers(1, len(draws) + 1)), replace=False).tolist())
        bits = random_bits(rng, len(masked))
        rows = dict(zip(masked, bits, strict=True))
        step = step_input([(seq, 1) for seq in seqs], BLOCK)
        tokens = made.run(step, draws, masks=filled_with(masked, bits)).tokens
        for i, (seq, rule, got) in enumerate(zip(seqs, draws, tokens, strict=True)):
            logits = np.append(table[seq.tokens[-1]], np.float32(0.0))
            wanted = reference.sample(logits, Draw.at(rule, 1, mask=rows.get(i)))
            if isinstance(wanted, str) or isinstance(got, str):
                assert got == wanted, rule
                none_left += got == "no_token_left"
            elif got.token_id != wanted.token_id:
                near += 1  # a sum that lies at a boundary
            else:
                assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4), "logprobs are of the raw row"
    assert none_left > 20
    assert near <= 2
    made.close()


def test_a_mask_holds_before_the_penalties_and_beside_the_other_masks(maker: Any) -> None:
    table = np.zeros((VOCAB, WIDTH), np.float32)
    table[1, :4] = 9.0, 8.0, 7.0, 6.0
    made = echo(maker, table)
    params = SamplingParams(
        temperature=0.0, repetition_penalty=2.0, allowed_token_ids=(0, 1, 2, 3), logit_bias=((3, 2.5),)
    )
    rule = DrawRule(params=params, random_stream=0, history=[1, 1], prompt_len=1, banned_token_ids=(2,))
    wanted = {0b1111: 0, 0b1110: 3, 0b0110: 1, 0b0100: "no_token_left", 1 << 9: "no_token_left"}
    for word, token in wanted.items():
        bits = np.array([[word, 0]], np.uint32)
        (got,) = made.run(step_input([(Seq([1], [0]), 1)], BLOCK), [rule], masks=filled_with([0], bits)).tokens
        assert (got if isinstance(got, str) else got.token_id) == token
    made.close()


def test_a_fill_that_raises_fails_the_step_and_no_other(maker: Any) -> None:
    made = echo(maker, table_of(15))
    rule = DrawRule(params=SamplingParams(temperature=0.0), random_stream=0)
    step = step_input([(Seq([3], [0]), 1)], BLOCK)

    def fill(rows: NDArray[np.uint32]) -> None:
        raise RuntimeError("no mask today")

    with pytest.raises(RuntimeError, match="no mask today"):
        made.run(step, [rule], masks=DrawMasks([0], fill))
    (token,) = made.run(step, [rule]).tokens
    assert not isinstance(token, str)
    made.close()


HISTORIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.9},
    "dry": {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breaker_ids": (5,)},
    "bad words": {"bad_words_token_ids": ((3,), (4, 4, 6), *((a, b) for a in range(4) for b in range(6)))},
    "stages": {"top_k": 9, "top_p": 0.9, "min_p": 0.01, "logit_bias": ((2, 1.0),)},
}


def drawn_at_once(made: Backend, tokens: list[int], spans: list[range], leak: int = 0, **sampling: Any) -> Any:
    """Chunks of 12 tokens from 0 on, each drawing at its span, with what stands before each draw as its history.

    leak: so many tokens more.
    """
    rule = DrawRule(params=SamplingParams(logprobs=2, **sampling), random_stream=5, prompt_len=3)
    rules = [replace(rule, history=[*tokens, *tokens[:leak]], random_stream=i) for i in range(len(spans))]
    places = [(i, position) for i, span in enumerate(spans) for position in span]
    step = step_input(
        [(Seq(tokens, [3 * i, 3 * i + 1, 3 * i + 2]), 12) for i in range(len(spans))],
        BLOCK,
        logit_rows=[12 * i + position for i, position in places],
    )
    lens = [position + 1 + leak for _, position in places]
    return places, made.run(step, [rules[i] for i, _ in places], history_lens=lens).tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", HISTORIES)
def test_several_draws_of_a_chunk_are_those_that_it_draws_one_by_one(maker: Any, name: str, temperature: float) -> None:
    rng = np.random.default_rng(16)
    table = (0.3 * rng.standard_normal((VOCAB, WIDTH))).astype(np.float32)
    table[:, :8] += 2.0  # the tokens that stand in the history are the likely ones
    made = echo(maker, table)
    sampling = {**HISTORIES[name], "temperature": temperature}
    tokens = rng.integers(0, 8, 12).tolist()
    spans = [range(3, 9), range(11, 12), range(12), range(5, 6)]
    places, found = drawn_at_once(made, tokens, spans, **sampling)
    for (i, position), got in zip(places, found, strict=True):
        seen = tokens[: position + 1]
        rule = DrawRule(params=SamplingParams(logprobs=2, **sampling), random_stream=i, history=seen, prompt_len=3)
        step = step_input([(Seq(seen, [0, 1, 2]), position + 1)], BLOCK)
        (alone,) = made.run(step, [rule]).tokens
        wanted = reference.sample(np.append(table[seen[-1]], np.float32(0.0)), Draw.at(rule, position + 1))
        assert got.token_id == alone.token_id == wanted.token_id
        assert got.logprob == pytest.approx(alone.logprob, abs=1e-5)
    if name in ("penalties", "dry", "bad words"):  # a history that is longer by one would be noticed
        _, other = drawn_at_once(made, tokens, spans, leak=1, **sampling)
        assert [token.token_id for token in other] != [token.token_id for token in found]
    made.close()
