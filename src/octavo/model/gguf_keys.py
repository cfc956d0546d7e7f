"""What a GGUF file's metadata says of a model's shape, and how to say it: what most decoders have in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ModelFileError
from octavo.core.model_config import ModelConfig, RopeScaling, RopeTable
from octavo.kernels.reference.rope import yarn_attention_factor
from octavo.model.config_values import (
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    ConfigValues,
    check_shape,
    llama3_frequency_divisors,
)
from octavo.weights.dequantise import dequantise
from octavo.weights.gguf_file import GGUFFile
from octavo.weights.messages import plain

ROPE_FACTORS = "rope_freqs.weight"  # llama 3's frequency divisors: read into the config, so not a weight
LONG_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")  # LongRoPE's
ROPE_TENSORS = frozenset({ROPE_FACTORS, *LONG_FACTORS})

#: Keys that are read, or say nothing about the arithmetic.
_KNOWN = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_log_multiplier",
    }
)
#: Keys that change the arithmetic in ways octavo does not have, with the values at which they change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "attention.scale": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
}
#: Architectures whose models ``shape_keys`` can say.
WRITTEN = frozenset({"llama", "qwen2", "qwen3"})


class GGUFKeys(ConfigValues):
    """The keys under the architecture's name, and what the file's tensors say besides."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.general = ConfigValues(file.metadata, str(file.path))
        self.architecture = self.general.text("general.architecture")
        prefix = self.architecture + "."
        keys = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
        super().__init__(keys, f"{file.path}, {prefix}*")

    def has_tensor(self, name: str) -> bool:
        """Whether the file has a tensor of this name of its own."""
        return name in self.file.tensors

    def decoder(
        self,
        kind: type[ModelConfig] = ModelConfig,
        *,
        also_known: Collection[str] = (),
        centred: bool = False,
        **special: Any,
    ) -> ModelConfig:
        """The shape of a decoder. A key that is neither known nor neutral raises ``ModelFileError``.

        kind: the architecture's own config, if it has one. also_known: keys that the architecture has read itself.
        centred: norms are layer norms. special: further fields of the config. Of a file without tensors (a vocabulary)
        the head counts as untied.
        """
        eps = "attention.layer_norm_epsilon" if centred else "attention.layer_norm_rms_epsilon"
        for key, value in self.values.items():
            if key not in _KNOWN and key not in (*also_known, eps) and value not in _NEUTRAL.get(key, ()):
                self.fail(f"{key} is {value!r}, which changes the model in a way that is not supported")
        file = self.file
        hidden_size = self.whole("embedding_length", MAX_WIDTH)
        num_heads = self.whole("attention.head_count", MAX_HEADS)
        head_dim = self.head_dim()
        if self.whole("attention.value_length", MAX_HEAD_DIM, default=head_dim) != head_dim:
            self.fail("attention.value_length differs from the length of keys, which is not supported")
        rope = self.rope()
        fields: dict[str, Any] = {
            "architecture": self.architecture,
            "name": plain(self.general.text("general.name", default=file.path.stem), 100),
            "hidden_size": hidden_size,
            "num_layers": self.num_layers(),
            "num_heads": num_heads,
            "num_kv_heads": self.whole("attention.head_count_kv", num_heads, default=num_heads),
            "head_dim": head_dim,
            "intermediate_size": self.whole("feed_forward_length", MAX_WIDTH),
            "vocab_size": self._vocab_size(),
            "max_position": self.whole("context_length", MAX_CONTEXT),
            "rms_norm_eps": self.real(eps, 1.0),
            "rope_theta": rope.theta,
            "rope_dim": rope.dim,
            "rope_scaling": rope.scaling,
            "tied_embeddings": bool(file.tensors) and "output.weight" not in file.tensors,
        }
        return check_shape(kind(**(fields | special)), str(file.path))

    def num_layers(self) -> int:
        """Layers of the model."""
        return self.whole("block_count", min(MAX_LAYERS, len(self.file.tensors) or MAX_LAYERS))

    def rope(self, **changes: Any) -> RopeTable:
        """The table of the keys; changes: fields that the keys do not say."""
        head_dim = self.head_dim()
        dim = self.whole("rope.dimension_count", MAX_HEAD_DIM, default=head_dim)
        theta = self.real("rope.freq_base", default=10_000.0)
        return RopeTable(**({"theta": theta, "dim": dim, "scaling": self._rope_scaling(theta, dim)} | changes))

    def head_dim(self) -> int:
        """Dimensions of a head."""
        num_heads = self.whole("attention.head_count", MAX_HEADS)
        even = max(1, self.whole("embedding_length", MAX_WIDTH) // num_heads)
        return self.whole("attention.key_length", MAX_HEAD_DIM, default=even)

    def _vocab_size(self) -> int:
        """Rows of the embedding, which must be as many as there are tokens."""
        if not self.file.tensors:
            return self.whole("vocab_size", MAX_VOCAB)
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None:
            self.general.fail("tensor 'token_embd.weight' is missing; this is not a complete model")
        rows = embedding.shape[0]
        tokens = self.file.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, tuple) and len(tokens) != rows:
            self.general.fail(f"tokenizer.ggml.tokens has {len(tokens)} tokens but token_embd.weight has {rows} rows")
        return rows

    def pattern(self, key: str, num_layers: int) -> tuple[bool, ...]:
        """A list with a flag for each layer."""
        value = self.values.get(key)
        if not isinstance(value, tuple) or len(value) != num_layers or any(not isinstance(x, bool) for x in value):
            self.fail(f"{key} is {value!r} but must be a list of {num_layers} times true or false")
        return value

    def every(self, key: str, step: int, num_layers: int) -> tuple[bool, ...]:
        """Which layers look through a window: ``key`` says (a list, or a step), or all but each ``step``-th."""
        if isinstance(self.values.get(key), tuple):
            return self.pattern(key, num_layers)
        step = self.whole(key, MAX_LAYERS, default=step)
        return tuple((i + 1) % step != 0 for i in range(num_layers))

    def _rope_scaling(self, theta: float, rope_dim: int) -> RopeScaling | None:
        """From the keys (linear, yarn) or from the tensors of frequency divisors (llama 3, longrope)."""
        # "none" with a factor occurs in real files and means what it says
        kind = self.text("rope.scaling.type", default="linear" if "rope.scale_linear" in self.values else "none")
        if kind not in ("none", "linear", "yarn", "longrope"):
            self.fail(
                f"rope.scaling.type is {kind!r}; supported are none, linear, yarn, longrope and llama 3's factors"
            )
        old_factor = self.real("rope.scale_linear", default=1.0)
        factor = self.real("rope.scaling.factor", default=old_factor) if kind == "linear" else 1.0
        if kind == "longrope" or any(self.has_tensor(name) for name in LONG_FACTORS):
            return self._longrope(rope_dim)
        if kind == "yarn":
            return self._yarn(self.real("rope.scaling.factor"))
        linear = RopeScaling(kind="linear", factor=factor) if factor != 1.0 else None
        if not self.has_tensor(ROPE_FACTORS):
            return linear
        if linear is not None:
            self.fail(f"rope.scaling.factor is {factor} and there is a tensor {ROPE_FACTORS!r}; one or the other")
        divisors = self._divisors(ROPE_FACTORS, rope_dim)
        if np.all(divisors == 1.0):
            return None
        # The file has the divisors but not the four numbers they were computed from: three are the same in every
        # published llama 3 model, and the largest divisor is the fourth. Accept only if these give them back.
        scaling = RopeScaling(kind="llama3", factor=float(divisors.max()))
        if not np.allclose(divisors, llama3_frequency_divisors(theta, rope_dim, scaling), rtol=1e-3):
            self.fail(f"tensor {ROPE_FACTORS!r} holds frequency divisors that are not those of llama 3")
        return scaling

    def _yarn(self, factor: float) -> RopeScaling:
        """llama.cpp multiplies the file's attention factor by YaRN's; the log multiplier is ``mscale_all_dim``."""
        if self.real("rope.scaling.yarn_ext_factor", default=1.0) != 1.0:
            self.fail(
                f"rope.scaling.yarn_ext_factor is {self.values['rope.scaling.yarn_ext_factor']!r}, which must be 1"
            )
        grown = yarn_attention_factor(factor, 1.0, self.real("rope.scaling.yarn_log_multiplier", default=0.0, low=0.0))
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_context=self.whole("rope.scaling.original_context_length", MAX_CONTEXT),
            beta_fast=self.real("rope.scaling.yarn_beta_fast", default=32.0),
            beta_slow=self.real("rope.scaling.yarn_beta_slow", default=1.0),
            attention_factor=self.real("rope.scaling.yarn_attn_factor", default=1.0) * grown,
        )

    def _longrope(self, rope_dim: int) -> RopeScaling:
        long, short = (self._divisors(name, rope_dim) for name in LONG_FACTORS)
        if not np.all(np.isfinite([long, short])) or not np.all(np.array([long, short]) > 0):
            self.fail(f"tensors {' and '.join(LONG_FACTORS)} must hold numbers above 0")
        return RopeScaling(
            kind="longrope",
            original_context=self.whole("rope.scaling.original_context_length", MAX_CONTEXT),
            divisors=tuple(long.tolist()),
            short_divisors=tuple(short.tolist()),
            attention_factor=self.real("rope.scaling.attn_factor", default=1.0),
        )

    def _divisors(self, name: str, rope_dim: int) -> NDArray[np.float32]:
        tensor = self.file.tensors.get(name)
        if tensor is None:
            self.fail(f"tensor {name!r} is missing")
        if tensor.shape != (rope_dim // 2,) or tensor.encoding != "F32":
            self.fail(f"tensor {name!r} is {tensor.encoding} {tensor.shape} but must be F32 of {rope_dim // 2}")
        return dequantise(self.file.data(name), tensor.encoding, tensor.shape)


def shape_keys(config: ModelConfig) -> Mapping[str, object]:
    """The metadata from which ``GGUFKeys.decoder`` reads ``config``. ``ModelFileError`` for what it cannot say."""
    kinds = {None, "linear", "llama3"}
    scaling = config.rope_scaling.kind if config.rope_scaling is not None else None
    special = type(config) is not ModelConfig or config.layer_windows or config.layer_ropes or scaling not in kinds
    if (
        config.architecture not in WRITTEN
        or special
        or config.hidden_act != "silu"
        or config.sliding_window is not None
    ):
        raise ModelFileError(
            f"{config.name} is not a plain {config.architecture} model; only those are written as GGUF"
        )
    if config.attention_soft_cap is not None or config.logits_soft_cap is not None:
        raise ModelFileError(f"{config.name} caps its scores, which a {config.architecture} file cannot say")
    keys: dict[str, object] = {
        "block_count": config.num_layers,
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.rope_dim,
        "rope.freq_base": config.rope_theta,
    }
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope_scaling.factor}
    named = {f"{config.architecture}.{key}": value for key, value in keys.items()}
    return {"general.architecture": config.architecture, "general.name": config.name, **named}
