"""GGUF, the model: from a file's keys and tensor names to ``ModelConfig`` and canonical weights."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ModelFileError
from octavo.core.model_config import ModelConfig, RopeScaling
from octavo.kernels.reference.dequantise import dequantise
from octavo.kernels.weight_tensor import Encoding, WeightTensor
from octavo.model.weights.base import WeightSource
from octavo.model.weights.config_values import (
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
from octavo.model.weights.gguf_file import GGUFFile, GGUFTensor
from octavo.model.weights.messages import plain

__all__ = ["GGUFFile", "GGUFTensor", "GGUFWeights"]

_TOP_LEVEL = {
    "token_embd.weight": "embedding.weight",
    "output_norm.weight": "final_norm.weight",
    "output.weight": "head.weight",
}
_IN_LAYER = {
    "attn_norm": "attention_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
_FROM_TOP_LEVEL = {name: file_name for file_name, name in _TOP_LEVEL.items()}
_FROM_LAYER = {part: file_part for file_part, part in _IN_LAYER.items()}
_LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)")
_INTERLEAVED = re.compile(r"blk\.[0-9]+\.attn_[qk]\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"  # llama 3's frequency divisors: read into the config, so not a weight

#: Keys of the llama architecture that octavo reads, or that say nothing about the arithmetic.
_LLAMA_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "tensor_data_layout",
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
#: Keys that change the arithmetic in ways octavo does not have, with the value at which they change nothing.
_LLAMA_NEUTRAL: dict[str, tuple[object, ...]] = {
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


class GGUFWeights(WeightSource):
    """A GGUF model file. Tensors are views of the memory map, except Q and K, whose rows are put in another order.

    file: the ``GGUFFile`` with the metadata, for the tokenizer and the chat template
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.file = GGUFFile(path)
        try:
            self.config = read_gguf_config(self.file)
            self._file_names = _canonical_names(self.file)
        except BaseException:
            self.file.close()
            raise
        self.fingerprint = self.file.fingerprint

    def names(self) -> Iterable[str]:
        return self._file_names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def encoding(self, name: str) -> Encoding:
        return self._entry(name).encoding

    def tensor(self, name: str) -> WeightTensor:
        tensor = self._entry(name)
        data = self.file.data(tensor.name)
        if _INTERLEAVED.fullmatch(tensor.name):
            data = self._undo_interleaving(data, tensor.shape[0])
        return WeightTensor(name=name, shape=tensor.shape, encoding=tensor.encoding, data=data)

    def close(self) -> None:
        self.file.close()

    def _entry(self, name: str) -> GGUFTensor:
        if name not in self._file_names:
            raise ModelFileError(f"{self.file.path} has no tensor {name!r}")
        return self.file.tensors[self._file_names[name]]

    def _undo_interleaving(self, data: NDArray[np.uint8], num_rows: int) -> NDArray[np.uint8]:
        """Whole rows [num_rows, bytes] of a Q or K tensor, or the numbers of its bias, in rotate-half order.

        llama GGUFs keep the two dimensions that RoPE rotates together in neighbouring rows 2j, 2j + 1 of a head; the
        kernels pair j with j + rope_dim / 2. Dimensions beyond rope_dim are not rotated and stay where they are.
        """
        head_dim, order = self.config.head_dim, _rotate_half_order(self.config)
        if num_rows % head_dim:
            return data  # mis-shaped: check_complete names it
        return data.reshape(num_rows // head_dim, head_dim, -1)[:, order].reshape(-1)


def _canonical_names(file: GGUFFile) -> dict[str, str]:
    """Canonical name -> name in the file, for every tensor that is a weight."""
    names: dict[str, str] = {}
    for file_name in file.tensors:
        if file_name == _ROPE_FACTORS:
            continue
        name = canonical_name(file_name)
        if name in names:
            raise ModelFileError(
                f"{file.path}: tensors {names[name]!r} and {file_name!r} are both {plain(name, 100)!r}"
            )
        names[name] = file_name
    return names


def canonical_name(file_name: str) -> str:
    """GGUF tensor name -> canonical name; a name without a counterpart is given as it is."""
    if file_name in _TOP_LEVEL:
        return _TOP_LEVEL[file_name]
    match = _LAYER_NAME.fullmatch(file_name)
    if match is None or match[2] not in _IN_LAYER:
        return file_name
    return f"layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


def gguf_name(name: str) -> str:
    """Canonical name -> GGUF tensor name, the inverse of ``canonical_name``; KeyError if there is none."""
    if not name.startswith("layers."):
        return _FROM_TOP_LEVEL[name]
    _, layer, part, kind = name.split(".")
    return f"blk.{layer}.{_FROM_LAYER[part]}.{kind}"


def interleaved(name: str, data: NDArray[np.uint8], config: ModelConfig) -> NDArray[np.uint8]:
    """The bytes of a canonical tensor in the file's order of rows: Q and K interleaved, everything else as it is."""
    part = name.split(".")[-2]
    if part not in ("q", "k"):
        return data
    num_heads = config.num_heads if part == "q" else config.num_kv_heads
    order = np.argsort(_rotate_half_order(config))
    return data.reshape(num_heads, config.head_dim, -1)[:, order].reshape(-1)


def _rotate_half_order(config: ModelConfig) -> NDArray[np.intp]:
    """[head_dim]: which row of a head in the file each row in rotate-half order is."""
    half = config.rope_dim // 2
    order = np.arange(config.head_dim)
    order[: 2 * half] = np.arange(2 * half).reshape(half, 2).T.ravel()
    return order


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """The shape that the metadata describes. Of a file without tensors (a vocabulary) the head counts as untied."""
    general = ConfigValues(file.metadata, str(file.path))
    architecture = general.text("general.architecture")
    if architecture != "llama":
        general.fail(f"general.architecture is {architecture!r}; supported is llama")
    if general.whole("split.count", 65_535, low=0, default=0) > 1:
        general.fail("this is one part of a split model; merge the parts (llama-gguf-split --merge) and use the result")
    prefix = architecture + "."
    keys = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    values = ConfigValues(keys, f"{file.path}, {prefix}*")
    for key, value in keys.items():
        if key not in _LLAMA_KEYS and value not in _LLAMA_NEUTRAL.get(key, ()):
            values.fail(f"{key} is {value!r}, which changes the model in a way that is not supported")

    hidden_size = values.whole("embedding_length", MAX_WIDTH)
    num_heads = values.whole("attention.head_count", MAX_HEADS)
    head_dim = values.whole("attention.key_length", MAX_HEAD_DIM, default=max(1, hidden_size // num_heads))
    if values.whole("attention.value_length", MAX_HEAD_DIM, default=head_dim) != head_dim:
        values.fail("attention.value_length differs from the length of keys, which is not supported")
    rope_dim = values.whole("rope.dimension_count", MAX_HEAD_DIM, default=head_dim)
    rope_theta = values.real("rope.freq_base", default=10_000.0)
    config = ModelConfig(
        architecture=architecture,
        name=plain(general.text("general.name", default=file.path.stem), 100),
        hidden_size=hidden_size,
        num_layers=values.whole("block_count", min(MAX_LAYERS, len(file.tensors) or MAX_LAYERS)),
        num_heads=num_heads,
        num_kv_heads=values.whole("attention.head_count_kv", num_heads, default=num_heads),
        head_dim=head_dim,
        intermediate_size=values.whole("feed_forward_length", MAX_WIDTH),
        vocab_size=_vocab_size(file, general, values),
        max_position=values.whole("context_length", MAX_CONTEXT),
        rms_norm_eps=values.real("attention.layer_norm_rms_epsilon", 1.0),
        rope_theta=rope_theta,
        rope_dim=rope_dim,
        rope_scaling=_rope_scaling(file, values, rope_theta, rope_dim),
        tied_embeddings=bool(file.tensors) and "output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
    )
    return check_shape(config, str(file.path))


def _vocab_size(file: GGUFFile, general: ConfigValues, values: ConfigValues) -> int:
    """Rows of the embedding, which must be as many as there are tokens."""
    if not file.tensors:
        return values.whole("vocab_size", MAX_VOCAB)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        general.fail("tensor 'token_embd.weight' is missing; this is not a complete model")
    rows = embedding.shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, tuple) and len(tokens) != rows:
        general.fail(f"tokenizer.ggml.tokens has {len(tokens)} tokens but token_embd.weight has {rows} rows")
    return rows


def _rope_scaling(file: GGUFFile, values: ConfigValues, theta: float, rope_dim: int) -> RopeScaling | None:
    """From the keys (linear) or from the tensor of frequency divisors (llama 3)."""
    # "none" with a factor occurs in real files and means what it says
    kind = values.text("rope.scaling.type", default="linear" if "rope.scale_linear" in values.values else "none")
    if kind not in ("none", "linear"):
        values.fail(f"rope.scaling.type is {kind!r}; supported are none, linear and llama 3's factors")
    old_factor = values.real("rope.scale_linear", default=1.0)
    factor = values.real("rope.scaling.factor", default=old_factor) if kind == "linear" else 1.0
    linear = RopeScaling(kind="linear", factor=factor) if factor != 1.0 else None
    if _ROPE_FACTORS not in file.tensors:
        return linear
    if linear is not None:
        values.fail(f"rope.scaling.factor is {factor} and there is a tensor {_ROPE_FACTORS!r}; one or the other")
    tensor = file.tensors[_ROPE_FACTORS]
    if tensor.shape != (rope_dim // 2,) or tensor.encoding != "F32":
        values.fail(f"tensor {_ROPE_FACTORS!r} is {tensor.encoding} {tensor.shape} but must be F32 of {rope_dim // 2}")
    divisors = dequantise(file.data(_ROPE_FACTORS), tensor.encoding, tensor.shape)
    if np.all(divisors == 1.0):
        return None
    # The file has the divisors but not the four numbers they were computed from: three are the same in every published
    # llama 3 model, and the largest divisor is the fourth. Accept only if these give the file's divisors back.
    scaling = RopeScaling(kind="llama3", factor=float(divisors.max()))
    if not np.allclose(divisors, llama3_frequency_divisors(theta, rope_dim, scaling), rtol=1e-3):
        values.fail(f"tensor {_ROPE_FACTORS!r} holds frequency divisors that are not those of llama 3")
    return scaling
