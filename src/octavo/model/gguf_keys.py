"""What a GGUF file's metadata says of a model's shape, and how to say it: what most decoders have in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from octavo.core.errors import ModelFileError
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
    llama3_frequency_divisors,
)
from octavo.weights.dequantise import dequantise
from octavo.weights.gguf_file import GGUFFile
from octavo.weights.messages import plain

ROPE_FACTORS = "rope_freqs.weight"  # llama 3's frequency divisors: read into the config, so not a weight

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
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
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

    def decoder(self, *, also_known: Collection[str] = (), **special: Any) -> ModelConfig:
        """The shape of a decoder. A key that is neither known nor neutral raises ``ModelFileError``.

        also_known: keys that the architecture has read itself; special: further fields of ``ModelConfig``. Of a file
        without tensors (a vocabulary) the head counts as untied.
        """
        for key, value in self.values.items():
            if key not in _KNOWN and key not in also_known and value not in _NEUTRAL.get(key, ()):
                self.fail(f"{key} is {value!r}, which changes the model in a way that is not supported")
        file = self.file
        hidden_size = self.whole("embedding_length", MAX_WIDTH)
        num_heads = self.whole("attention.head_count", MAX_HEADS)
        head_dim = self.whole("attention.key_length", MAX_HEAD_DIM, default=max(1, hidden_size // num_heads))
        if self.whole("attention.value_length", MAX_HEAD_DIM, default=head_dim) != head_dim:
            self.fail("attention.value_length differs from the length of keys, which is not supported")
        rope_dim = self.whole("rope.dimension_count", MAX_HEAD_DIM, default=head_dim)
        rope_theta = self.real("rope.freq_base", default=10_000.0)
        config = ModelConfig(
            architecture=self.architecture,
            name=plain(self.general.text("general.name", default=file.path.stem), 100),
            hidden_size=hidden_size,
            num_layers=self.whole("block_count", min(MAX_LAYERS, len(file.tensors) or MAX_LAYERS)),
            num_heads=num_heads,
            num_kv_heads=self.whole("attention.head_count_kv", num_heads, default=num_heads),
            head_dim=head_dim,
            intermediate_size=self.whole("feed_forward_length", MAX_WIDTH),
            vocab_size=self._vocab_size(),
            max_position=self.whole("context_length", MAX_CONTEXT),
            rms_norm_eps=self.real("attention.layer_norm_rms_epsilon", 1.0),
            rope_theta=rope_theta,
            rope_dim=rope_dim,
            rope_scaling=self._rope_scaling(rope_theta, rope_dim),
            tied_embeddings=bool(file.tensors) and "output.weight" not in file.tensors,
            **special,
        )
        return check_shape(config, str(file.path))

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

    def _rope_scaling(self, theta: float, rope_dim: int) -> RopeScaling | None:
        """From the keys (linear) or from the tensor of frequency divisors (llama 3)."""
        # "none" with a factor occurs in real files and means what it says
        kind = self.text("rope.scaling.type", default="linear" if "rope.scale_linear" in self.values else "none")
        if kind not in ("none", "linear"):
            self.fail(f"rope.scaling.type is {kind!r}; supported are none, linear and llama 3's factors")
        old_factor = self.real("rope.scale_linear", default=1.0)
        factor = self.real("rope.scaling.factor", default=old_factor) if kind == "linear" else 1.0
        linear = RopeScaling(kind="linear", factor=factor) if factor != 1.0 else None
        if not self.has_tensor(ROPE_FACTORS):
            return linear
        if linear is not None:
            self.fail(f"rope.scaling.factor is {factor} and there is a tensor {ROPE_FACTORS!r}; one or the other")
        tensor = self.file.tensors[ROPE_FACTORS]
        if tensor.shape != (rope_dim // 2,) or tensor.encoding != "F32":
            self.fail(f"tensor {ROPE_FACTORS!r} is {tensor.encoding} {tensor.shape} but must be F32 of {rope_dim // 2}")
        divisors = dequantise(self.file.data(ROPE_FACTORS), tensor.encoding, tensor.shape)
        if np.all(divisors == 1.0):
            return None
        # The file has the divisors but not the four numbers they were computed from: three are the same in every
        # published llama 3 model, and the largest divisor is the fourth. Accept only if these give them back.
        scaling = RopeScaling(kind="llama3", factor=float(divisors.max()))
        if not np.allclose(divisors, llama3_frequency_divisors(theta, rope_dim, scaling), rtol=1e-3):
            self.fail(f"tensor {ROPE_FACTORS!r} holds frequency divisors that are not those of llama 3")
        return scaling


def shape_keys(config: ModelConfig) -> Mapping[str, object]:
    """The metadata from which ``GGUFKeys.decoder`` reads ``config``. ``ModelFileError`` for what it cannot say."""
    if config.hidden_act != "silu" or config.sliding_window is not None:
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
