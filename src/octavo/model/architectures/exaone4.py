"""EXAONE 4 (LG AI Research 2025, arXiv:2507.11407): norms after, normed heads, rotation only through windows."""

from __future__ import annotations

from octavo.core.model_config import ModelConfig
from octavo.model.architectures.llama import by_layer
from octavo.model.architectures.olmo2 import Olmo2
from octavo.model.gguf_keys import GGUFKeys
from octavo.model.hf_fields import HFFields

_LAYERS_OF_32B = 64  # the first GGUF files did not say its window; llama.cpp knows it by the number of layers


class Exaone4(Olmo2):
    """Of a model with windows, layers without one are not rotated; one without windows rotates in all."""

    qk_norm = "head"

    @classmethod
    def from_gguf(cls, keys: GGUFKeys) -> ModelConfig:
        """The shape that a GGUF file describes."""
        key, layers, table = "attention.sliding_window", keys.num_layers(), keys.rope()
        window = keys.whole(key, 1 << 24, low=0, default=4096 if layers == _LAYERS_OF_32B else 0)
        sliding = keys.every(f"{key}_pattern", 4, layers) if window else (False,) * layers
        return keys.decoder(
            also_known={key, f"{key}_pattern"},
            layer_windows=by_layer(sliding, window, None),
            layer_ropes=by_layer(sliding, table, None if window else table),
        )

    @classmethod
    def from_hf(cls, fields: HFFields) -> ModelConfig:
        """The shape that a config.json describes."""
        window, table = fields.window(), fields.rope()
        pattern = fields.values.get("sliding_window_pattern")
        if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
            sliding = fields.sliding_layers(lambda i: pattern[i % len(pattern)] == "L")
        else:
            step = fields.whole("sliding_window_pattern", 1 << 12, low=0, default=4) or 1
            sliding = fields.sliding_layers(lambda i: (i + 1) % step != 0)
        if window is None:
            sliding = (False,) * fields.num_layers()
        return fields.decoder(
            default_eps=1e-5,
            layer_windows=by_layer(sliding, window, None),
            layer_ropes=by_layer(sliding, table, None if window is not None else table),
        )
