"""Ratios and their intervals: paired by round, in logarithms."""

from __future__ import annotations

import math

import pytest
from ratios import interval_of, ratio_of, t95


def test_a_ratio_is_taken_within_each_round() -> None:
    """The second round's machine was ten times slower for both: the ratio does not notice."""
    found = ratio_of({1: 200.0, 2: 20.0}, {1: 100.0, 2: 10.0}, more_is_better=True)
    assert found is not None
    assert (found.value, found.low, found.high, found.rounds) == (
        pytest.approx(2),
        pytest.approx(2),
        pytest.approx(2),
        2,
    )


def test_less_is_better_turns_the_ratio_round() -> None:
    found = ratio_of({1: 0.1}, {1: 0.4}, more_is_better=False)
    assert found is not None
    assert found.value == pytest.approx(4)
    assert (found.low, found.high, found.rounds) == (None, None, 1)


def test_rounds_that_only_one_of_them_has_do_not_count() -> None:
    found = ratio_of({1: 3.0, 2: 1.0, 4: 3.0}, {1: 1.0, 3: 100.0, 4: 1.0}, more_is_better=True)
    assert found is not None
    assert (found.value, found.rounds) == (pytest.approx(3), 2)
    assert ratio_of({1: 3.0}, {2: 1.0}, more_is_better=True) is None


def test_the_interval_is_students_of_the_logarithms() -> None:
    """By hand: logs 0, 1, 2: mean 1, standard deviation 1, half = 4.303 / sqrt(3)."""
    found = interval_of([0.0, 1.0, 2.0])
    half = 4.303 / math.sqrt(3)
    assert found.low is not None
    assert found.high is not None
    assert math.log(found.low) == pytest.approx(1 - half)
    assert math.log(found.high) == pytest.approx(1 + half)


def test_twice_and_half_as_fast_is_as_fast() -> None:
    found = ratio_of({1: 2.0, 2: 1.0}, {1: 1.0, 2: 2.0}, more_is_better=True)
    assert found is not None
    assert found.value == pytest.approx(1)


def test_quantiles_fall_toward_those_of_the_normal_distribution() -> None:
    values = [t95(degrees) for degrees in range(1, 40)]
    assert values == sorted(values, reverse=True)
    assert values[0] == 12.706
    assert values[-1] == 1.96
