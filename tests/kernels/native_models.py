"""Random weights, tiny models and backends for the tests of the native kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo.core.model_config import ModelConfig
from octavo.kernels.base import Array, KVCacheLayout, Ops
from octavo.kernels.native.backend import Activations, NativeBackend
from octavo.model.dummy import random_matrix
from octavo.model.registry import build_model, find_architecture
from octavo.weights.dequantise import GROUP_LAYOUT, Encoding
from octavo.weights.tensor import WeightTensor

ISAS = _native.available_isas()
#: One per packed kind: all encodings that are repacked share I8_K, of which IQ2_XS and TQ2_0 stand for the rest.
# fmt: off
ENCODINGS: tuple[Encoding, ...] = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "IQ2_XS", "TQ2_0",
)
# fmt: on
QUANTISED = tuple(encoding for encoding in GROUP_LAYOUT if GROUP_LAYOUT[encoding][0] > 1)


def config(**changes: object) -> ModelConfig:
    """A llama of two layers, small enough to run a hundred times in a test."""
    fields: dict[str, object] = {
        "architecture": "llama",
        "name": "tiny",
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 117,
        "max_position": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_dim": 16,
        "tied_embeddings": False,
    }
    return ModelConfig(**(fields | changes))  # type: ignore[arg-type]


def config_of(encoding: Encoding, **changes: object) -> ModelConfig:
    """The same with rows of whole blocks."""
    if GROUP_LAYOUT[encoding][0] > 32:
        changes = {"hidden_size": 256, "head_dim": 64, "rope_dim": 64, "intermediate_size": 256} | changes
    return config(**changes)


def whole(encoding: Encoding, width: int) -> int:
    """``width`` rounded up to whole blocks."""
    block = GROUP_LAYOUT[encoding][0]
    return -(-width // block) * block


def random_tensor(
    rng: np.random.Generator, shape: tuple[int, ...], encoding: Encoding = "F32", name: str = "w"
) -> WeightTensor:
    """Values of about unit variance per output for a matrix [N, K]; norms (1-D) near 1."""
    size = 1.0 / np.sqrt(shape[-1])
    values = rng.normal(0, size, shape) if len(shape) == 2 else 1.0 + 0.1 * rng.normal(size=shape)
    if encoding == "F32" or len(shape) == 1:
        data = values.astype(np.float32)
        return WeightTensor(name=name, shape=shape, encoding="F32", data=data.reshape(-1).view(np.uint8))
    if encoding == "F16":
        data16 = values.astype(np.float16)
        return WeightTensor(name=name, shape=shape, encoding=encoding, data=data16.reshape(-1).view(np.uint8))
    if encoding == "BF16":
        bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return WeightTensor(name=name, shape=shape, encoding=encoding, data=bits.reshape(-1).view(np.uint8))
    return WeightTensor(name=name, shape=shape, encoding=encoding, data=random_matrix(rng, shape, encoding))  # type: ignore[arg-type]


def to_bfloat16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Finite numbers rounded to bfloat16, to nearest even, as float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@contextmanager
def pinned_isa(isa: str) -> Iterator[None]:
    """OCTAVO_ISA for the time of a ``with``."""
    before = os.environ.get("OCTAVO_ISA")
    os.environ["OCTAVO_ISA"] = isa
    try:
        yield
    finally:
        if before is None:
            del os.environ["OCTAVO_ISA"]
        else:
            os.environ["OCTAVO_ISA"] = before


def backend(
    model_config: ModelConfig,
    isa: str = "",
    *,
    threads: int = 1,
    kv_dtype: str = "auto",
    fused: bool = True,
    activations: Activations = "int8",
) -> NativeBackend:
    """A native backend on one ISA; "" takes the best. One arithmetic on all of them, so that results compare."""
    with pinned_isa(isa):
        return NativeBackend(model_config, threads, "exact", kv_dtype, fused=fused, activations=activations)


def allocate(
    made: NativeBackend, c: ModelConfig, *, num_blocks: int = 64, block_size: int = 16, grouped: bool = False
) -> None:
    """grouped: each kind of layer has so many blocks of its own; else all share them, as if all kept everything."""
    full = KVCacheLayout.full(
        num_layers=c.num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
    )
    groups = c.cache_groups
    made.allocate_kv_cache(replace(full, groups=groups, num_blocks=(num_blocks,) * len(groups)) if grouped else full)


def random_llama(
    c: ModelConfig,
    encoding: Encoding,
    isa: str = "",
    *,
    block_size: int = 16,
    num_blocks: int = 64,
    grouped: bool = False,
    **options: Any,
) -> NativeBackend:
    """A backend with a bound random model: the same weights for the same arguments. options: those of ``backend``."""
    rng = np.random.default_rng(7)
    made = backend(c, isa, **options)
    weights = {
        name: made.pack(random_tensor(rng, spec.shape, encoding, name), spec.uses)
        for name, spec in find_architecture("llama").tensors(c).items()
    }
    allocate(made, c, num_blocks=num_blocks, block_size=block_size, grouped=grouped)
    made.bind(build_model(c, weights), max_tokens=1024, max_seqs=64)
    return made


class OpModel:
    """A "model" that is one call of ops on given rows: token t embeds as row t of ``table``."""

    def __init__(
        self, made: NativeBackend, c: ModelConfig, table: NDArray[np.float32], call: Callable[[Ops, Array], Array]
    ):
        self.config, self._call = c, call
        tensor = WeightTensor(name="x", shape=table.shape, encoding="F32", data=table.reshape(-1).view(np.uint8))
        self._table = made.pack(tensor, frozenset({"embedding"}))
        self._made = made

    def hidden(self, ops: Ops) -> Array:
        return ops.select_logit_rows(self._call(ops, ops.embedding(self._table, ops.token_ids)))

    def head(self, ops: Ops, rows: Array) -> Array:
        rng = np.random.default_rng(0)
        head = random_tensor(rng, (self.config.vocab_size, rows.width))
        return ops.logits(rows, self._made.pack(head, frozenset({"head"})))
