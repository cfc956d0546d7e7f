"""What Hugging Face's config.json says of a model's shape: what most decoders have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from octavo.core.model_config import ModelConfig, RopeScaling, RopeTable
from octavo.kernels.reference.rope import longrope_attention_factor, yarn_attention_factor
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

#: config.json's name -> ours. Their plain "gelu" is the exact one.
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu": "gelu_erf"}

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

    def with_defaults(self, defaults: Mapping[str, object]) -> HFFields:
        """The same, with values for fields that the file leaves out."""
        return HFFields({**defaults, **self.values}, self.where, self.name)

    def decoder(
        self,
        kind: type[ModelConfig] = ModelConfig,
        *,
        eps: str = "rms_norm_eps",
        default_eps: float = 1e-6,
        activation: str = "hidden_act",
        default_activation: str = "silu",
        rope: RopeTable | None = None,
        **special: Any,
    ) -> ModelConfig:
        """The shape of a decoder.

        kind: the architecture's own config, if it has one. eps, activation: what it calls these fields, and what they
        are where the file does not say. rope: the table of most layers; None: ``self.rope()``, of whole heads. special:
        further fields of the config.
        """
        for field, reason in _REFUSED.items():
            if self.values.get(field):
                self.fail(f"{field} is set: {reason}")
        act = self.text(activation, default=default_activation)
        if act not in _ACTIVATIONS:
            self.fail(f"{activation} is {act!r}; supported are {', '.join(_ACTIVATIONS)}")
        num_heads = self.whole("num_attention_heads", MAX_HEADS)
        table = rope or self.rope()
        if rope is None and table.dim != self.head_dim():
            self.fail(f"partial_rotary_factor is not 1, which the {self.model_type} architecture does not have")
        fields: dict[str, Any] = {
            "architecture": self.model_type,
            "name": self.name,
            "hidden_size": self.whole("hidden_size", MAX_WIDTH),
            "num_layers": self.num_layers(),
            "num_heads": num_heads,
            "num_kv_heads": self.whole("num_key_value_heads", num_heads, default=num_heads),
            "head_dim": self.head_dim(),
            "intermediate_size": self.whole("intermediate_size", MAX_WIDTH),
            "vocab_size": self.whole("vocab_size", MAX_VOCAB),
            "max_position": self.max_position(table),
            "rms_norm_eps": self.real(eps, 1.0, default=default_eps),
            "rope_theta": table.theta,
            "rope_dim": table.dim,
            "rope_scaling": table.scaling,
            "tied_embeddings": self.flag("tie_word_embeddings", default=False),
            "hidden_act": _ACTIVATIONS[act],
        }
        return check_shape(kind(**(fields | special)), self.where)

    def num_layers(self) -> int:
        """Layers of the model."""
        return self.whole("num_hidden_layers", MAX_LAYERS)

    def head_dim(self) -> int:
        """Dimensions of a head."""
        num_heads = self.whole("num_attention_heads", MAX_HEADS)
        return self.whole("head_dim", MAX_HEAD_DIM, default=max(1, self.whole("hidden_size", MAX_WIDTH) // num_heads))

    def max_position(self, table: RopeTable) -> int:
        """Tokens of context. Dynamic scaling and YaRN reach beyond what the file may say, by their factor."""
        said, scaling = self.whole("max_position_embeddings", MAX_CONTEXT, default=2048), table.scaling
        reaches = scaling is not None and scaling.kind in ("dynamic", "yarn")
        stretched = scaling.original_context * scaling.factor if scaling is not None and reaches else 0.0
        return int(min(max(said, stretched), MAX_CONTEXT))

    def sliding_layers(self, default: Callable[[int], bool]) -> tuple[bool, ...]:
        """Which layers look through a window: ``layer_types`` says, else ``default`` of the layer's number."""
        kinds = self.values.get("layer_types")
        if kinds is None:
            return tuple(default(layer) for layer in range(self.num_layers()))
        known = {"sliding_attention": True, "full_attention": False}
        if not isinstance(kinds, list) or len(kinds) != self.num_layers() or any(x not in known for x in kinds):
            self.fail(f"layer_types must be a list of {self.num_layers()} times {' or '.join(known)}")
        return tuple(known[x] for x in kinds)

    def window(self) -> int | None:
        """``sliding_window``; None where there is none."""
        missing = self.values.get("sliding_window") is None
        return None if missing else self.whole("sliding_window", MAX_CONTEXT)

    def local_rope(self, key: str, default: float) -> RopeTable:
        """The table of layers with a window, where it is another and not stretched. key: its theta, in older files."""
        sections = self.values.get("rope_parameters")
        if isinstance(sections, dict) and "sliding_attention" in sections:
            return self.rope("sliding_attention", default_theta=default)
        return RopeTable(theta=self.real(key, default=default), dim=self.head_dim())

    def rope(
        self,
        layer_type: str | None = None,
        *,
        also_known: Collection[str] = (),
        default_theta: float = 10_000.0,
        default_share: float = 1.0,
    ) -> RopeTable:
        """A table: ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` (before).

        layer_type: of which layers, where rope_parameters has a section for each. also_known: fields that the
        architecture reads itself. default_theta, default_share: theta and the share of a head that is rotated, if the
        file does not say.
        """
        section = "rope_parameters" if self.values.get("rope_parameters") is not None else "rope_scaling"
        fields = self.values.get(section)
        if isinstance(fields, dict) and layer_type in fields:
            section, fields = f"{section}, {layer_type}", fields[layer_type]
        if fields is None:
            fields = {}
        if not isinstance(fields, dict):
            self.fail(f"{section} is a {type(fields).__name__} but must be an object")
        rope = ConfigValues(fields, f"{self.where}, {section}")
        theta = rope.real("rope_theta", default=self.real("rope_theta", default=default_theta))
        said = self.real("partial_rotary_factor", 1.0, default=default_share)
        share = rope.real("partial_rotary_factor", 1.0, default=said)
        dim = int(self.head_dim() * share)
        kind = rope.text("rope_type", default=rope.text("type", default="default"))
        if kind not in _SCALINGS:
            rope.fail(f"rope_type is {kind!r}; supported are {', '.join(_SCALINGS)}")
        read, known = _SCALINGS[kind]
        for field in fields:
            if field not in (*_ROPE_FIELDS, *known, *also_known):
                rope.fail(f"{field} is {fields[field]!r}, which changes the model in a way that is not supported")
        return RopeTable(theta=theta, dim=dim, scaling=read(self, rope))


def _linear(fields: HFFields, rope: ConfigValues) -> RopeScaling:
    return RopeScaling(kind="linear", factor=rope.real("factor"))


def _dynamic(fields: HFFields, rope: ConfigValues) -> RopeScaling:
    context = rope.whole(_ORIGINAL, MAX_CONTEXT, default=fields.whole("max_position_embeddings", MAX_CONTEXT))
    return RopeScaling(kind="dynamic", factor=rope.real("factor"), original_context=context)


def _llama3(fields: HFFields, rope: ConfigValues) -> RopeScaling:
    low, high = rope.real("low_freq_factor"), rope.real("high_freq_factor")
    if not low < high:
        rope.fail(f"low_freq_factor {low:g} must be below high_freq_factor {high:g}")
    return RopeScaling(
        kind="llama3",
        factor=rope.real("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=rope.whole(_ORIGINAL, MAX_CONTEXT),
    )


def _yarn(fields: HFFields, rope: ConfigValues) -> RopeScaling:
    context = rope.whole(_ORIGINAL, MAX_CONTEXT, default=fields.whole("max_position_embeddings", MAX_CONTEXT))
    factor = rope.real("factor", default=fields.whole("max_position_embeddings", MAX_CONTEXT) / context)
    weights = [rope.real(name, low=0.0, default=0.0) for name in ("mscale", "mscale_all_dim")]
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context=context,
        beta_fast=rope.real("beta_fast", default=32.0),
        beta_slow=rope.real("beta_slow", default=1.0),
        truncate=rope.flag("truncate", default=True),
        attention_factor=rope.real("attention_factor", default=yarn_attention_factor(factor, *weights)),
    )


def _longrope(fields: HFFields, rope: ConfigValues) -> RopeScaling:
    longest = fields.whole("max_position_embeddings", MAX_CONTEXT)
    said = fields.whole(_ORIGINAL, MAX_CONTEXT, default=longest)
    context = rope.whole(_ORIGINAL, MAX_CONTEXT, default=said)
    grown = longrope_attention_factor(rope.real("factor", default=longest / context), context)
    return RopeScaling(
        kind="longrope",
        original_context=context,
        divisors=_divisors(rope, "long_factor"),
        short_divisors=_divisors(rope, "short_factor"),
        attention_factor=rope.real("attention_factor", default=grown),
    )


def _divisors(rope: ConfigValues, key: str) -> tuple[float, ...]:
    value = rope.values.get(key)
    numbers = isinstance(value, list) and all(isinstance(x, int | float) and 0 < x < 1e30 for x in value)
    if not isinstance(value, list) or not numbers or len(value) > MAX_HEAD_DIM:
        rope.fail(f"{key} must be a list of numbers above 0, one for each pair that is rotated")
    return tuple(map(float, value))


_ORIGINAL = "original_max_position_embeddings"
#: rope_type -> (how it is read, its fields)
_SCALINGS: dict[str, tuple[Callable[[HFFields, ConfigValues], RopeScaling | None], tuple[str, ...]]] = {
    "default": (lambda fields, rope: None, ()),
    "linear": (_linear, ("factor",)),
    "dynamic": (_dynamic, ("factor", _ORIGINAL)),
    "llama3": (_llama3, ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)),
    "yarn": (
        _yarn,
        ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim", _ORIGINAL),
    ),
    "longrope": (_longrope, ("factor", "long_factor", "short_factor", "attention_factor", _ORIGINAL)),
}
_SCALINGS["su"] = _SCALINGS["longrope"]  # what it was called first
_ROPE_FIELDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
