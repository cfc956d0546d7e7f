"""Rotary frequencies, and what else of a position enters attention: one definition for every backend."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ModelFileError
from octavo.core.model_config import RopeScaling, RopeTable
from octavo.kernels.base import PositionScale

Doubles = NDArray[np.float64]


def inverse_frequencies(table: RopeTable) -> Doubles:
    """Radians per position of each rotated pair, [dim // 2] (RoPE: Su et al. 2021, arXiv:2104.09864).

    Pair i turns by theta ** (-2 i / dim), stretched by the table's scaling. Raises ``ModelFileError`` for a scaling
    that is not known, or whose numbers make no table.
    """
    frequencies: Doubles = table.theta ** -(np.arange(0, table.dim, 2, dtype=np.float64) / table.dim)
    scaling = table.scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    if scaling.kind == "yarn":
        return _yarn(frequencies, table, scaling)
    if scaling.kind == "longrope":
        if len(scaling.divisors) != len(frequencies):
            raise ModelFileError(
                f"longrope has {len(scaling.divisors)} divisors but {len(frequencies)} pairs are rotated"
            )
        return frequencies / np.array(scaling.divisors, np.float64)
    raise ModelFileError(
        f"RoPE scaling {scaling.kind!r} is not supported; octavo knows linear, llama3, yarn and longrope"
    )


def settled(table: RopeTable, context: int) -> RopeTable:
    """The table for contexts up to ``context`` tokens, where the model would choose by the length of each sequence.

    One for all: keys that are cached have been rotated by one table, and another could not read them.
    longrope has one set of divisors up to the original context and another beyond. dynamic is NTK-aware scaling
    (bloc97 2023, as transformers has it): theta grows with the part of the context that is beyond the original one.
    """
    scaling = table.scaling
    if scaling is None or scaling.kind not in ("longrope", "dynamic"):
        return table
    if scaling.kind == "longrope":
        short = scaling.short_divisors and context <= scaling.original_context
        divisors = scaling.short_divisors if short else scaling.divisors
        return replace(table, scaling=replace(scaling, divisors=divisors, short_divisors=()))
    if table.dim < 4:
        raise ModelFileError(f"dynamic RoPE scaling needs at least 4 rotated dimensions, not {table.dim}")
    over = max(context / scaling.original_context, 1.0)
    grown = scaling.factor * over - (scaling.factor - 1.0)
    return replace(table, theta=table.theta * grown ** (table.dim / (table.dim - 2)), scaling=None)


def attention_factor(table: RopeTable) -> float:
    """What cos and sin are multiplied by."""
    return 1.0 if table.scaling is None else table.scaling.attention_factor


def rotation_table(table: RopeTable, num_positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin of positions [0, num_positions), times the attention factor: two arrays [num_positions, dim // 2].

    Angles are made in float64: in float32 an angle of 8,192 radians is off by 5e-4.
    """
    angles = np.outer(np.arange(num_positions, dtype=np.float64), inverse_frequencies(table))
    factor = attention_factor(table)
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


def position_factors(scale: PositionScale, positions: NDArray[np.int32]) -> NDArray[np.float32]:
    """What queries at these positions [T] are multiplied by, [T]."""
    steps = (positions.astype(np.int64) + scale.shift) // scale.length
    return (1.0 + scale.beta * np.log1p(steps.astype(np.float64))).astype(np.float32)


def yarn_attention_factor(factor: float, mscale: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """By how much YaRN makes queries and keys grow (Peng et al. 2023, arXiv:2309.00071, section 3.4).

    mscale, mscale_all_dim: DeepSeek's two weights of the logarithm; the second, if there is one, takes some back.
    """

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    return grown(mscale) / grown(mscale_all_dim) if mscale and mscale_all_dim else grown(1.0)


def longrope_attention_factor(factor: float, original_context: int) -> float:
    """The same of LongRoPE (Ding et al. 2024, arXiv:2402.13753), as its models' own code has it.

    factor: context of the stretched model over the original one.
    """
    return math.sqrt(1.0 + math.log(factor) / math.log(original_context)) if factor > 1.0 else 1.0


def _llama3(frequencies: Doubles, scaling: RopeScaling) -> Doubles:
    """Llama 3.1's rule: pairs that turn often within the original context stay, slow ones are divided by ``factor``.

    Between ``low_freq_factor`` and ``high_freq_factor`` turns per original context the two are blended linearly.
    """
    turns = scaling.original_context * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    if not span > 0:
        raise ModelFileError(
            f"llama3 RoPE scaling has high_freq_factor {scaling.high_freq_factor}, "
            f"which must exceed low_freq_factor {scaling.low_freq_factor}"
        )
    keep: Doubles = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor


def _yarn(frequencies: Doubles, table: RopeTable, scaling: RopeScaling) -> Doubles:
    """YaRN (Peng et al. 2023, arXiv:2309.00071, section 3.2): as llama 3's, but blended linearly over the pairs.

    The pairs between which it blends are those that turn ``beta_fast`` and ``beta_slow`` times in the original context.
    """
    if not 0 < scaling.beta_slow <= scaling.beta_fast or not table.theta > 1.0:
        raise ModelFileError(
            f"yarn RoPE scaling has beta_fast {scaling.beta_fast}, beta_slow {scaling.beta_slow} and theta "
            f"{table.theta}; it takes 0 < beta_slow <= beta_fast and a theta above 1"
        )

    def pair_of(turns: float) -> float:
        wavelengths = scaling.original_context / (turns * 2 * math.pi)
        return table.dim * math.log(wavelengths) / (2 * math.log(table.theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, table.dim - 1)
    last += 0.001 if first == last else 0.0  # as the published code: a step instead of a ramp
    stretched: Doubles = np.clip((np.arange(len(frequencies)) - first) / (last - first), 0.0, 1.0)
    return stretched * frequencies / scaling.factor + (1.0 - stretched) * frequencies
