"""Typed, bounded look-ups in what a model file says about itself; shared by the GGUF and the Hugging Face readers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ModelFileError
from octavo.core.model_config import ModelConfig, RopeScaling
from octavo.weights.messages import plain

MAX_CONTEXT = 1 << 24  # tokens; rotary tables grow with it, so a forged value must not get through
MAX_WIDTH = 1 << 20  # hidden, intermediate
MAX_LAYERS = 4096
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_VOCAB = 1 << 22


class ConfigValues:
    """Values under one name space of a file (GGUF: the keys of an architecture; Hugging Face: config.json)."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values, self.where = values, where

    def fail(self, problem: str) -> NoReturn:
        raise ModelFileError(f"{self.where}: {plain(problem)}")

    def whole(self, key: str, high: int, *, low: int = 1, default: int | None = None) -> int:
        """A whole number from ``low`` to ``high``, both inclusive."""
        value = self._present(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.fail(f"{key} is {_shown(value)} but must be a whole number from {low} to {high}")
        return value

    def real(
        self, key: str, high: float = math.inf, *, default: float | None = None, low: float | None = None
    ) -> float:
        """A finite number above 0, or from ``low`` on, at most ``high``."""
        value = self._present(key, default)
        # the type test comes first: a huge int does not convert
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not (value <= min(high, 1e30) and (value > 0 if low is None else value >= low))
        ):
            self.fail(
                f"{key} is {_shown(value)} but must be a number "
                + ("above 0" if low is None else f"from {low:g}")
                + (f" up to {high}" if high < 1e30 else "")
            )
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._present(key, default)
        if not isinstance(value, bool):
            self.fail(f"{key} is {_shown(value)} but must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._present(key, default)
        if not isinstance(value, str):
            self.fail(f"{key} is {_shown(value)} but must be a string")
        return value

    def _present(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            self.fail(f"{key} is missing")
        return value


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, tuple | list | dict) else f"a {type(value).__name__} of {len(value)}"
    return text if len(text) <= 80 else text[:77] + "..."


def check_shape(config: ModelConfig, where: str) -> ModelConfig:
    """Relations between the fields that every architecture relies on."""
    if config.num_heads % config.num_kv_heads:
        raise ModelFileError(
            f"{where}: {config.num_heads} query heads cannot share {config.num_kv_heads} KV heads evenly"
        )
    if config.layer_windows and len(config.layer_windows) != config.num_layers:
        raise ModelFileError(
            f"{where}: windows of {len(config.layer_windows)} layers, but there are {config.num_layers}"
        )
    if config.rope_dim < 2 or config.rope_dim > config.head_dim or config.rope_dim % 2:
        raise ModelFileError(
            f"{where}: {config.rope_dim} rotary dimensions must be an even number, at most head_dim {config.head_dim}"
        )
    return config


def llama3_frequency_divisors(theta: float, rope_dim: int, scaling: RopeScaling) -> NDArray[np.float64]:
    """By how much llama 3.1's long-context scaling slows each rotary frequency: [rope_dim / 2], from 1 to ``factor``.

    Wavelengths under original_context / high_freq_factor stay, those over original_context / low_freq_factor are
    divided by the whole factor, and in between the *frequency* is interpolated (llama 3.1's published reference code).
    """
    frequency = theta ** -(np.arange(0, rope_dim, 2, dtype=np.float64) / rope_dim)
    turns = scaling.original_context * frequency / (2 * math.pi)  # how often the original context goes round
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return 1.0 / ((1.0 - blend) / scaling.factor + blend)
