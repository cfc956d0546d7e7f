"""Mixture of experts and adapters against a plain loop over rows; a backend without them refuses them by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS, WITHOUT
from native_steps import Seq
from numpy.typing import NDArray
from probe import TABLE, WIDTH, bound, computed, f32, tokens_of, values

from octavo.core.errors import ConfigError
from octavo.kernels.base import Array, Ops, RoutingRule, Weight

Doubles = NDArray[np.float64]
LINEAR, BIAS, EXPERTS, ADAPTER = (frozenset({use}) for use in ("linear", "bias", "experts", "adapter"))
E, INNER = 8, 12
RULES = {
    "mixtral": RoutingRule(num_chosen=2),
    "qwen3": RoutingRule(num_chosen=3, normalise=False),
    "one": RoutingRule(num_chosen=1, score="sigmoid", normalise=False),
    "deepseek v2": RoutingRule(
        num_chosen=2, normalise=False, scale=16.0, num_groups=4, num_chosen_groups=2, group_best=1
    ),
    "deepseek v3": RoutingRule(num_chosen=3, score="sigmoid", scale=2.5, num_groups=4, num_chosen_groups=2),
    "all": RoutingRule(num_chosen=E),
}


@pytest.fixture(params=[name for name in BACKENDS if name not in WITHOUT])
def backend_name(request: pytest.FixtureRequest) -> str:
    """Those that have the ops."""
    name: str = request.param
    return name


def arrays() -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(3)
    shapes = {"router": (E, WIDTH), "correction": (E,), "up": (E, INNER, WIDTH), "down": (E, WIDTH, INNER)}
    shapes |= {"up_bias": (E, INNER), "a": (3, 4, WIDTH), "b": (3, WIDTH, 4)}
    return {name: (rng.standard_normal(shape) / 3).astype(np.float32) for name, shape in shapes.items()}


def packed(*names: str) -> Any:
    uses = {"router": LINEAR, "correction": BIAS, "a": ADAPTER, "b": ADAPTER}
    return {name: (f32(arrays()[name]), uses.get(name, EXPERTS)) for name in names}


def chosen(logits: Doubles, rule: RoutingRule, correction: Doubles) -> list[tuple[int, float]]:
    """(expert, weight) of one row, the best first."""
    scores = np.exp(logits) / np.exp(logits).sum() if rule.score == "softmax" else 1 / (1 + np.exp(-logits))
    ranks = scores + correction
    size = E // rule.num_groups
    standing = [sum(sorted(ranks[g * size : (g + 1) * size])[-rule.group_best :]) for g in range(rule.num_groups)]
    groups = sorted(range(rule.num_groups), key=lambda g: -standing[g])[: rule.num_chosen_groups]
    experts = sorted((e for e in range(E) if e // size in groups), key=lambda e: -ranks[e])[: rule.num_chosen]
    total = sum(scores[e] for e in experts) if rule.normalise else 1.0
    return [(e, scores[e] / total * rule.scale) for e in experts]


def expert_layer(rule: RoutingRule, *, corrected: bool) -> Any:
    def call(ops: Ops, x: Array, w: Mapping[str, Weight]) -> Array:
        routing = ops.route(ops.linear(x, w["router"]), rule, w["correction"] if corrected else None)
        inner = ops.activation(ops.expert_linear(x, w["up"], routing, w["up_bias"]), "silu")
        return ops.combine(ops.expert_linear(inner, w["down"], routing), routing)

    return call


NAMES = ("router", "correction", "up", "up_bias", "down")


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_a_layer_of_experts_is_the_sum_over_those_that_each_row_chose(
    maker: Any, tolerance: float, name: str, corrected: bool
) -> None:
    rule, w = RULES[name], {key: array.astype(np.float64) for key, array in arrays().items()}
    found, x = computed(maker, expert_layer(rule, corrected=corrected), packed(*NAMES), count=60)
    wanted = np.zeros_like(x)
    for row in range(len(x)):
        for expert, weight in chosen(w["router"] @ x[row], rule, w["correction"] * corrected):
            inner = w["up"][expert] @ x[row] + w["up_bias"][expert]
            wanted[row] += weight * (w["down"][expert] @ (inner / (1 + np.exp(-inner))))
    np.testing.assert_allclose(found, wanted, atol=20 * tolerance * rule.scale)


def test_a_row_gets_the_same_alone_as_in_company(maker: Any, tolerance: float) -> None:
    made = bound(maker, TABLE, expert_layer(RULES["deepseek v3"], corrected=True), packed(*NAMES))
    ids = tokens_of(30)
    together = values(made, [(Seq(ids, list(range(8))), 30)])
    for i, token in enumerate(ids):
        alone = values(made, [(Seq([token], [0]), 1)])
        np.testing.assert_allclose(alone[0], together[i], atol=tolerance)
    made.close()


def test_the_weights_of_an_expert_that_nobody_chose_are_not_touched(maker: Any) -> None:
    """They are NaN, so that a single product with them would show."""
    weights = arrays()
    weights["router"][5] = 0.0
    weights["up"][5], weights["down"][5] = np.nan, np.nan
    w = {
        name: (f32(weights[name]), LINEAR if name == "router" else EXPERTS)
        for name in ("router", "up", "down", "up_bias")
    }
    w["correction"] = (f32(np.where(np.arange(E) == 5, -100.0, 0.0)), BIAS)
    found, _ = computed(maker, expert_layer(RULES["mixtral"], corrected=True), w, count=60)
    assert np.isfinite(found).all()


def test_equal_scores_choose_the_lowest_expert(maker: Any, tolerance: float) -> None:
    weights = arrays()
    weights["router"][:] = 0.0
    w = {
        name: (f32(weights[name]), LINEAR if name == "router" else EXPERTS)
        for name in ("router", "up", "down", "up_bias")
    }
    found, x = computed(maker, expert_layer(RULES["mixtral"], corrected=False), w)
    wide = {name: array.astype(np.float64) for name, array in weights.items()}
    wanted = np.zeros_like(x)
    for expert in (0, 1):
        inner = x @ wide["up"][expert].T + wide["up_bias"][expert]
        wanted += 0.5 * (inner / (1 + np.exp(-inner))) @ wide["down"][expert].T
    np.testing.assert_allclose(found, wanted, atol=10 * tolerance)


def test_each_row_meets_its_own_adapter_or_none(maker: Any, tolerance: float) -> None:
    rows = np.random.default_rng(5).integers(-1, 3, 21)
    w = {name: array.astype(np.float64) for name, array in arrays().items()}
    found, x = computed(
        maker, lambda ops, x, w: ops.adapter_linear(ops.scale(x, 2.0), x, w["a"], w["b"], rows), packed("a", "b")
    )
    wanted = 2.0 * x
    for row, adapter in enumerate(rows):
        if adapter >= 0:
            wanted[row] += w["b"][adapter] @ (w["a"][adapter] @ x[row])
    np.testing.assert_allclose(found, wanted, atol=5 * tolerance)
    plain, _ = computed(maker, lambda ops, x, w: ops.scale(x, 2.0))
    np.testing.assert_array_equal(found[rows < 0], plain[rows < 0])


CALLS: dict[str, Any] = {
    "route": lambda ops, x, w: ops.route(x, RULES["mixtral"]),
    "expert_linear": lambda ops, x, w: ops.expert_linear(x, None, None),
    "combine": lambda ops, x, w: ops.combine(x, None),
    "adapter_linear": lambda ops, x, w: ops.adapter_linear(x, x, None, None, ops.token_ids),
}


@pytest.mark.parametrize(("name", "op"), [(name, op) for name, ops in WITHOUT.items() for op in sorted(ops)])
def test_what_a_backend_does_not_have_is_refused_by_name(name: str, op: str) -> None:
    with pytest.raises(ConfigError, match=f"op {op}.*--backend torch"):
        bound(BACKENDS[name][0], TABLE, CALLS[op])


@pytest.mark.parametrize("name", WITHOUT)
@pytest.mark.parametrize(("use", "op"), [("experts", "expert_linear"), ("adapter", "adapter_linear")])
def test_weights_for_such_an_op_are_refused_by_name(name: str, use: Any, op: str) -> None:
    assert op in WITHOUT[name]
    with pytest.raises(ConfigError, match=f"tensor w is for the op {op}"):
        bound(BACKENDS[name][0], TABLE, CALLS[op], {"w": (f32(arrays()["up"]), frozenset({use}))})
