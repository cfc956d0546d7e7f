"""Rotary frequencies: one definition for every backend."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ModelFileError
from octavo.core.model_config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> NDArray[np.float64]:
    """Radians per position of each rotated pair, [rope_dim // 2] (RoPE: Su et al. 2021, arXiv:2104.09864).

    Pair i turns by theta ** (-2 i / rope_dim), stretched by the config's scaling. Raises ``ModelFileError`` for a
    scaling that is not "linear" or "llama3".
    """
    exponents = np.arange(0, config.rope_dim, 2, dtype=np.float64) / config.rope_dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    raise ModelFileError(f"RoPE scaling {scaling.kind!r} is not supported; octavo knows linear and llama3")


def rotation_table(config: ModelConfig, num_positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin of positions [0, num_positions): two arrays [num_positions, rope_dim // 2].

    Angles are made in float64: in float32 an angle of 8,192 radians is off by 5e-4.
    """
    angles = np.outer(np.arange(num_positions, dtype=np.float64), inverse_frequencies(config))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _llama3(frequencies: NDArray[np.float64], scaling: RopeScaling) -> NDArray[np.float64]:
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
    keep = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor
