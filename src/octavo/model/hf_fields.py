"""What Hugging Face's config.json says of a model's shape: what most decoders have in common."""

from __future__ import annotations

from typing import Any

from octavo.core.model_config import ModelConfig, RopeScaling
from octavo.model.config_values import (
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    ConfigValues,
    check_shape,
)

#: config.json's name -> ours. Their plain "gelu" is the exact one, which octavo does not have.
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}

#: Fields that say that something other than the plain architecture is meant.
_REFUSED = {
    "quantization_config": "only unquantised safetensors are read; use a GGUF file for quantised weights",
    "auto_map": "this model runs code of its own, and octavo never does",
}


class HFFields(ConfigValues):
    """The fields of a config.json."""

    def __init__(self, fields: dict[str, object], where: str, name: str) -> None:
        """fields: the parsed file; where: its path, for messages; name: what to call the model."""
        super().__init__(fields, where)
        self.name = name
        self.model_type = self.text("model_type")

    def decoder(self, **special: Any) -> ModelConfig:
        """The shape of a decoder. special: further fields of ``ModelConfig``."""
        for field, reason in _REFUSED.items():
            if self.values.get(field):
                self.fail(f"{field} is set: {reason}")
        activation = self.text("hidden_act", default="silu")
        if activation not in _ACTIVATIONS:
            self.fail(f"hidden_act is {activation!r}; supported are {', '.join(_ACTIVATIONS)}")
        hidden_size = self.whole("hidden_size", MAX_WIDTH)
        num_heads = self.whole("num_attention_heads", MAX_HEADS)
        head_dim = self.whole("head_dim", MAX_HEAD_DIM, default=max(1, hidden_size // num_heads))
        rope_theta, rope_scaling = self._rope()
        config = ModelConfig(
            architecture=self.model_type,
            name=self.name,
            hidden_size=hidden_size,
            num_layers=self.whole("num_hidden_layers", MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=self.whole("num_key_value_heads", num_heads, default=num_heads),
            head_dim=head_dim,
            intermediate_size=self.whole("intermediate_size", MAX_WIDTH),
            vocab_size=self.whole("vocab_size", MAX_VOCAB),
            max_position=self.whole("max_position_embeddings", MAX_CONTEXT, default=2048),
            rms_norm_eps=self.real("rms_norm_eps", 1.0, default=1e-6),
            rope_theta=rope_theta,
            rope_dim=head_dim,
            rope_scaling=rope_scaling,
            tied_embeddings=self.flag("tie_word_embeddings", default=False),
            hidden_act=_ACTIVATIONS[activation],
            **special,
        )
        return check_shape(config, self.where)

    def _rope(self) -> tuple[float, RopeScaling | None]:
        """Base and scaling: ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` (before)."""
        section = "rope_parameters" if self.values.get("rope_parameters") is not None else "rope_scaling"
        fields = self.values.get(section)
        if fields is None:
            fields = {}
        if not isinstance(fields, dict):
            self.fail(f"{section} is a {type(fields).__name__} but must be an object")
        rope = ConfigValues(fields, f"{self.where}, {section}")
        theta = rope.real("rope_theta", default=self.real("rope_theta", default=10_000.0))
        if rope.real("partial_rotary_factor", default=self.real("partial_rotary_factor", default=1.0)) != 1.0:
            rope.fail(f"partial_rotary_factor is not 1, which the {self.model_type} architecture does not have")
        kind = rope.text("rope_type", default=rope.text("type", default="default"))
        if kind == "default":
            return theta, None
        if kind == "linear":
            return theta, RopeScaling(kind="linear", factor=rope.real("factor"))
        if kind != "llama3":
            rope.fail(f"rope_type is {kind!r}; supported are default, linear and llama3")
        low, high = rope.real("low_freq_factor"), rope.real("high_freq_factor")
        if not low < high:
            rope.fail(f"low_freq_factor {low:g} must be below high_freq_factor {high:g}")
        return theta, RopeScaling(
            kind="llama3",
            factor=rope.real("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_context=rope.whole("original_max_position_embeddings", MAX_CONTEXT),
        )
