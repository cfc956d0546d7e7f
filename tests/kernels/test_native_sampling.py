"""The C++ sampler against the written-out truth (kernels/reference/sampling.py), stage by stage and all together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import extreme_draws
import numpy as np
import pytest
from native_models import ISAS, allocate, backend, config
from native_steps import Seq, step_input
from numpy.typing import NDArray

from octavo.core.plan import DrawFailure, DrawRule, SampledToken
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.base import Array, Draw, DrawMasks, Ops
from octavo.kernels.native.backend import NativeBackend
from octavo.kernels.reference import sampling as reference
from octavo.weights.tensor import WeightTensor

Floats = NDArray[np.float32]


@dataclass
class Rows:
    """A backend whose logits are given: token t embeds as row t, and the head is the identity."""

    made: NativeBackend
    vocab_size: int

    @classmethod
    def of(cls, logits: Floats, isa: str = "") -> Rows:
        n, vocab = logits.shape
        c = config(vocab_size=vocab)
        made = backend(c, isa, threads=2)
        allocate(made, c)
        table = np.zeros((vocab, vocab), np.float32)
        table[:n] = logits
        made.bind(_Identity(made, c, table), max_tokens=n, max_seqs=1)
        return cls(made, vocab)

    def run(
        self, draws: Sequence[DrawRule], targets: Sequence[tuple[int, int]] = (), masks: DrawMasks | None = None
    ) -> list[SampledToken | DrawFailure]:
        """Row i, at position i, is drawn by draws[i], then come the targets."""
        n = len(draws) + len(targets)
        step = step_input([(Seq(list(range(n)), list(range(64))), n)], 16, logit_rows=range(n))
        out = self.made.run(step, draws, targets, masks=masks)
        return out.tokens + out.row_logprobs


class _Identity:
    def __init__(self, made: NativeBackend, c: object, table: Floats) -> None:
        self.config = c
        self._table, self._eye = (
            made.pack(
                WeightTensor(name="x", shape=t.shape, encoding="F32", data=t.reshape(-1).view(np.uint8)),
                frozenset({"embedding"}),
            )
            for t in (table, np.eye(len(table), dtype=np.float32))
        )

    def hidden(self, ops: Ops) -> Array:
        return ops.select_logit_rows(ops.embedding(self._table, ops.token_ids))

    def head(self, ops: Ops, rows: Array) -> Array:
        return ops.logits(rows, self._eye)


def compare(got: list[SampledToken | DrawFailure], logits: Floats, draws: Sequence[DrawRule]) -> None:
    for row, (token, draw) in enumerate(zip(got, draws, strict=True)):
        wanted = reference.sample(logits[row], Draw.at(draw, row + 1))
        if isinstance(wanted, str) or isinstance(token, str):
            assert token == wanted
            continue
        assert token.token_id == wanted.token_id, (row, draw)
        assert [i for i, _ in token.top] == [i for i, _ in wanted.top]
        if wanted.logprob is None:
            assert token.logprob is None
        else:
            assert token.logprob == pytest.approx(wanted.logprob, abs=2e-6)
            np.testing.assert_allclose([p for _, p in token.top], [p for _, p in wanted.top], atol=2e-6)


VOCAB, NUM = 389, 90
RNG = np.random.default_rng(0)
#: a third of the rows flat, a third peaked, a third full of ties
LOGITS = np.concatenate(
    [
        RNG.normal(0, 0.3, (NUM // 3, VOCAB)),
        RNG.normal(0, 4.0, (NUM // 3, VOCAB)),
        RNG.integers(-3, 4, (NUM // 3, VOCAB)),
    ]
).astype(np.float32)


@pytest.fixture(scope="module", params=ISAS)
def rows(request: pytest.FixtureRequest) -> Rows:
    return Rows.of(LOGITS, request.param)


STAGES = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"temperature": 1e-7},
    {"temperature": 100.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 150},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 0.9999999},
    {"typical_p": 0.2},
    {"typical_p": 0.9},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.01},
    {"xtc_probability": 0.5, "xtc_threshold": 0.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.001, "temperature": 0.05},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.95, "xtc_probability": 0.5, "xtc_threshold": 0.03},
    {"logit_bias": ((3, 5.0), (7, -100.0), (3, 2.5)), "temperature": 0.7},
    {"allowed_token_ids": (5, 9, 200, 388), "top_p": 0.9},
    {"allowed_token_ids": (5,), "logit_bias": ((5, -100.0),)},
]


@pytest.mark.parametrize("fields", STAGES, ids=lambda fields: ",".join(fields) or "plain")
def test_each_stage_draws_what_the_reference_draws(rows: Rows, fields: dict) -> None:
    params = SamplingParams(**fields, logprobs=4)
    draws = [DrawRule(params=params, random_stream=1000 + i) for i in range(NUM)]
    compare(rows.run(draws), LOGITS, draws)


HISTORIES = [
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7, "presence_penalty": -0.5},
    {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    {"dry_multiplier": 2.0, "dry_base": 3.0, "dry_allowed_length": 2, "dry_sequence_breaker_ids": (0, 4)},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_penalty_last_n": 9},
    {"dry_multiplier": 2.0, "dry_penalty_last_n": 0},
    {"bad_words_token_ids": ((3,), (1, 2), (0, 1, 4))},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "dry_multiplier": 1.0, "bad_words_token_ids": ((2, 2),)},
]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("fields", HISTORIES, ids=lambda fields: ",".join(fields))
def test_penalties_look_at_the_history_as_the_reference_does(rows: Rows, fields: dict, temperature: float) -> None:
    rng = np.random.default_rng(1)
    params = SamplingParams(**fields, temperature=temperature)
    draws = []
    for i in range(NUM):
        history = rng.integers(0, 6, i % 40).tolist()  # few distinct tokens: many repeats
        draws.append(DrawRule(params=params, random_stream=i, history=history, prompt_len=len(history) // 3))
    logits = LOGITS.copy()
    compare(rows.run(draws), logits, draws)


def test_banned_tokens_and_parameters_of_all_kinds_share_a_step(rows: Rows) -> None:
    rng, draws = np.random.default_rng(2), []
    for i in range(NUM):
        fields = STAGES[i % len(STAGES)] | HISTORIES[i % len(HISTORIES)]
        params = SamplingParams(**fields, logprobs=(None, 0, 20)[i % 3])
        history = rng.integers(0, VOCAB, 30).tolist() if i % 2 else [1, 2, 3] * 9
        banned = tuple(rng.integers(0, VOCAB, 3).tolist()) if i % 5 == 0 else ()
        draws.append(
            DrawRule(params=params, random_stream=2**63 + i, history=history, prompt_len=4, banned_token_ids=banned)
        )
    compare(rows.run(draws), LOGITS, draws)


def test_target_rows_report_their_token(rows: Rows) -> None:
    draw = DrawRule(params=SamplingParams(temperature=0.0), random_stream=0)
    targets = [(i, i % 21) for i in range(NUM - 1)]
    got = rows.run([draw], targets)
    for row, (token, alternatives) in enumerate(targets, start=1):
        wanted = reference.report(LOGITS[row], token, alternatives)
        assert isinstance(got[row], SampledToken)
        assert got[row].token_id == token
        assert got[row].logprob == pytest.approx(wanted.logprob, abs=2e-6)
        assert [i for i, _ in got[row].top] == [i for i, _ in wanted.top]


def test_every_instruction_set_reports_the_same_bits() -> None:
    draws = [DrawRule(params=SamplingParams(top_p=0.9, logprobs=5), random_stream=i) for i in range(NUM)]
    results = [Rows.of(LOGITS, isa).run(draws) for isa in ISAS]
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 200, VOCAB - 1])
def test_a_row_with_one_value_that_is_not_finite_fails(poison: float, place: int) -> None:
    logits = LOGITS[:3].copy()
    logits[1, place] = poison
    # 0 * inf is NaN in the identity head, so poison the row through a table of its own
    table = Rows.of(logits)
    params = SamplingParams(logprobs=1)
    got = table.run([DrawRule(params=params, random_stream=0)] * 3)
    assert [isinstance(token, SampledToken) or token for token in got] == [True, "not_finite", True]


def test_a_draw_with_everything_masked_fails_alone(rows: Rows) -> None:
    masked = DrawRule(params=SamplingParams(allowed_token_ids=(3,)), random_stream=0, banned_token_ids=(3,))
    free = DrawRule(params=SamplingParams(temperature=0.0), random_stream=0)
    got = rows.run([masked, free])
    assert got[0] == "no_token_left"
    assert isinstance(got[1], SampledToken)


@pytest.mark.parametrize("isa", ISAS)
def test_at_the_ends_of_every_range_a_token_comes(isa: str) -> None:
    table = Rows.of(np.tile(extreme_draws.rows(), (8, 1)), isa)
    for seed in range(10):
        rules = extreme_draws.rules(seed, 64)
        for i, (rule, token) in enumerate(zip(rules, table.run(rules), strict=True)):
            assert isinstance(token, SampledToken), rule
            draw = Draw.at(rule, i + 1)
            adjusted = reference.adjust(extreme_draws.rows()[i % 8], draw)
            assert adjusted[token.token_id] > -np.inf, "a masked token was drawn"
            if rule.params.greedy:
                assert token.token_id == int(np.argmax(adjusted)), rule


@pytest.mark.parametrize("isa", ISAS)
def test_truncation_stops_at_the_token_that_reaches_the_mass(isa: str) -> None:
    num = len(extreme_draws.BOUNDARIES)
    table = Rows.of(np.zeros((num, extreme_draws.BOUNDARY_VOCAB), np.float32), isa)
    draws = [
        extreme_draws.boundary_rule(fields, left, row + 1)
        for row, (fields, left) in enumerate(extreme_draws.BOUNDARIES)
    ]
    got = [token.token_id for token in table.run(draws) if isinstance(token, SampledToken)]
    assert got == [left - 1 for _, left in extreme_draws.BOUNDARIES]


@pytest.mark.parametrize("isa", ISAS)
def test_top_p_takes_the_unlikely_token_that_it_needs(isa: str) -> None:
    more: list[dict[str, object]] = [{}, {"typical_p": 1 - 2**-53}, {"min_p": 1e-9}]
    table = Rows.of(np.tile(extreme_draws.THIN_ROW, (len(more), 1)), isa)
    got = table.run([extreme_draws.thin_rule(row + 1, **fields) for row, fields in enumerate(more)])
    assert [token.token_id for token in got if isinstance(token, SampledToken)] == [1] * len(more)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("more", [{}, {"top_k": 3}, {"top_p": 1 - 2**-53}, {"typical_p": 1 - 2**-53}], ids=str)
def test_xtc_counts_a_token_at_the_threshold_as_above_it(isa: str, more: dict) -> None:
    # 32 tokens of which four are likely; the others have vanished
    logits = np.full((16, 32), -1e30, np.float32)
    logits[:, :4] = 0.0
    table, at, above = Rows.of(logits, isa), extreme_draws.XTC_AT_THE_THRESHOLD, extreme_draws.XTC_ABOVE_THE_THRESHOLD
    if "top_k" in more:  # of three, each has a third
        at, above = replace(at, xtc_threshold=1 / 3), replace(above, xtc_threshold=1 / 3 + 2**-20)
    likely = set(range(more.get("top_k", 4)))
    for params, drawn in ((replace(at, **more), {max(likely)}), (replace(above, **more), likely)):
        tokens = table.run([DrawRule(params=params, random_stream=stream) for stream in range(16)])
        assert {token.token_id for token in tokens if isinstance(token, SampledToken)} == drawn


def test_draws_follow_their_distribution() -> None:
    """19,200 draws from one row: frequencies within four standard deviations."""
    row = np.full(64, -1e4, np.float32)
    row[[3, 9, 30, 63]] = np.log([0.5, 0.25, 0.15, 0.1])
    table, counts = Rows.of(np.tile(row, (64, 1))), np.zeros(64)
    for step in range(300):
        draws = [DrawRule(params=SamplingParams(), random_stream=step) for _ in range(64)]
        for token in table.run(draws):
            assert isinstance(token, SampledToken)
            counts[token.token_id] += 1
    expected = 19200 * np.exp(row)
    assert (np.abs(counts - expected) <= 4 * np.sqrt(expected)).all()


@pytest.mark.parametrize("isa", ISAS)
def test_a_masked_row_is_the_same_alone_and_in_company(isa: str) -> None:
    """Company: rows with other masks, rows without, more than one slice of rows; and masks that come late."""
    rng = np.random.default_rng(3)
    vocab, count = 203, 130
    logits = (2 * rng.standard_normal((count, vocab))).astype(np.float32)
    rows = Rows.of(logits, isa)
    params = [SamplingParams(**fields, logprobs=2) for fields in ({"temperature": 0.0}, {}, {"top_p": 0.8})]  # type: ignore[arg-type]
    draws = [DrawRule(params=params[i % 3], random_stream=i) for i in range(count)]
    masked = [i for i in range(count) if i % 4]
    bits = rng.integers(0, 1 << 32, (count, -(-vocab // 32)), dtype=np.uint32)
    bits[5] = 0

    def late(into: NDArray[np.uint32]) -> None:
        time.sleep(0.01)
        into[:] = bits[masked]

    together = rows.run(draws, masks=DrawMasks(masked, late))
    assert together[5] == "no_token_left"
    for i in (0, 1, 2, 3, 5, 63, 65, 129):
        wanted = reference.sample(logits[i], Draw.at(draws[i], i + 1, mask=bits[i] if i in masked else None))
        step = step_input([(Seq(list(range(i + 1)), list(range(64)), computed=i), 1)], 16)
        mask = DrawMasks([0], lambda into, i=i: into.__setitem__(0, bits[i]))  # type: ignore[misc]
        (alone,) = rows.made.run(step, [draws[i]], masks=mask if i in masked else None).tokens
        assert alone == together[i], f"row {i}"
        if isinstance(wanted, str) or isinstance(alone, str):
            assert alone == wanted
        else:
            assert alone.token_id == wanted.token_id
    rows.made.close()
