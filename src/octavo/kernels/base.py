"""The op seam: what a model may ask of a backend, and what the engine hands to one each step.

A model is written once against ``Ops`` and never looks inside an ``Array``. The torch backend runs each op at once; the
native backend hands out symbolic arrays the first time, records a program, and replays it with one call per step.
Therefore model code may not branch on a number of tokens, sequences or rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.core.model_config import ModelConfig
from octavo.core.plan import DrawFailure, DrawRule, SampledToken
from octavo.core.records import hot_record
from octavo.weights.dequantise import Encoding
from octavo.weights.tensor import WeightTensor

Array = Any  # a backend's activation array: opaque to models
Weight = Any  # a backend's packed weight: opaque to models
Activation = Literal["silu", "gelu"]
WeightUse = Literal["linear", "embedding", "head", "norm", "bias"]  # head: the matrix of the logits


class Ops(Protocol):
    """The ops of one forward pass. T tokens run, R logit rows are wanted; H query heads, H_kv KV heads, D head_dim."""

    token_ids: Array  # [T]
    positions: Array  # [T]

    def embedding(self, table: Weight, token_ids: Array) -> Array:
        """Rows of ``table`` [vocab, hidden] -> [T, hidden]."""
        ...

    def rms_norm(self, x: Array, weight: Weight, eps: float) -> Array:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang, Sennrich 2019); arithmetic in float32."""
        ...

    def linear(self, x: Array, weight: Weight, bias: Weight | None = None) -> Array:
        """x [T, K] @ weight [N, K]^T (+ bias [N]) -> [T, N]."""
        ...

    def rope(self, x: Array, positions: Array, num_heads: int) -> Array:
        """Rotate each head of x [T, num_heads * D] by its position; pairs i, i + rope_dim/2 of the leading rope_dim.

        The frequencies come from the model's config (theta, rope_dim, scaling). RoPE: Su et al. 2021, arXiv:2104.09864.
        """
        ...

    def write_kv(self, layer: int, k: Array, v: Array) -> None:
        """Store k, v [T, H_kv * D] in the layer's cache at the step's slot_mapping; slot -1 writes nothing."""
        ...

    def paged_attention(
        self, layer: int, q: Array, *, scale: float, window: int | None = None, soft_cap: float | None = None
    ) -> Array:
        """Causal attention of q [T, H * D] over the sequences' cached positions [0, position] -> [T, H * D].

        window w: a query at p sees positions (p - w, p]. soft_cap c: scores become c * tanh(score / c).
        """
        ...

    def gated_mul(self, gate: Array, up: Array, activation: Activation) -> Array:
        """activation(gate) * up, elementwise [T, N]. gelu is the tanh approximation."""
        ...

    def add(self, a: Array, b: Array) -> Array:
        """Elementwise sum of two arrays of one shape."""
        ...

    def scale(self, x: Array, factor: float) -> Array:
        """x * factor."""
        ...

    def select_logit_rows(self, x: Array) -> Array:
        """The rows of x [T, hidden] whose logits are wanted (ModelInput.logit_rows) -> [R, hidden]."""
        ...

    def logits(self, x: Array, head: Weight, soft_cap: float | None = None) -> Array:
        """x [R, hidden] @ head [vocab, hidden]^T in float32, soft-capped if asked -> [R, vocab]."""
        ...


class Model(Protocol):
    """A decoder with its packed weights: pure calls of ops."""

    config: ModelConfig

    def hidden(self, ops: Ops) -> Array:
        """The whole pass up to the final norm, for the logit rows only: [R, hidden]."""
        ...

    def head(self, ops: Ops, rows: Array) -> Array:
        """Logits of some of those rows: [r, hidden] -> [r, vocab]. Called in slices: [prompt, vocab] never exists."""
        ...


@hot_record
class ModelInput:
    """One step, in one array: T tokens of S sequences, of which those with one query come first, R wanted rows.

    One array, since each that Python makes and hands over costs as much as the numbers of several sequences.
    """

    ints: array[int]  # int32: the parts below, one after the other
    num_tokens: int  # T
    num_rows: int  # R
    num_seqs: int  # S
    num_copies: int  # C
    num_one_query_seqs: int

    @classmethod
    def of(
        cls,
        *,
        token_ids: Iterable[int],
        positions: Iterable[int],
        slot_mapping: Iterable[int],
        logit_rows: Iterable[int],
        query_starts: Iterable[int],
        context_lens: Iterable[int],
        block_tables: Sequence[Iterable[int]],
        copies: Sequence[Iterable[int]] = (),
    ) -> ModelInput:
        """Of the parts, each of the length that its property below names."""
        starts, rows, tokens, seen = list(query_starts), list(logit_rows), list(token_ids), list(context_lens)
        parts = (tokens, positions, slot_mapping, rows, starts, seen, *copies, *block_tables)
        ones = sum(end - start == 1 for start, end in pairwise(starts))
        ints = array("i", map(int, chain.from_iterable(parts)))
        return cls(ints, len(tokens), len(rows), len(seen), len(copies), ones)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[T]"""
        return self._part(0, self.num_tokens)

    @property
    def positions(self) -> NDArray[np.int32]:
        """[T]"""
        return self._part(self.num_tokens, self.num_tokens)

    @property
    def slot_mapping(self) -> NDArray[np.int32]:
        """[T] block_id * block_size + offset; -1 writes nothing"""
        return self._part(2 * self.num_tokens, self.num_tokens)

    @property
    def logit_rows(self) -> NDArray[np.int32]:
        """[R] indices into T: first the rows of draws, then those of prompt logprobs"""
        return self._part(3 * self.num_tokens, self.num_rows)

    @property
    def query_starts(self) -> NDArray[np.int32]:
        """[S + 1] sequence s runs tokens [query_starts[s], query_starts[s + 1])"""
        return self._part(3 * self.num_tokens + self.num_rows, self.num_seqs + 1)

    @property
    def context_lens(self) -> NDArray[np.int32]:
        """[S] positions visible to the last query, itself included"""
        return self._part(3 * self.num_tokens + self.num_rows + self.num_seqs + 1, self.num_seqs)

    @property
    def copies(self) -> NDArray[np.int32]:
        """[C, 3] (src block, dst block, num_tokens), before any KV write"""
        start = 3 * self.num_tokens + self.num_rows + 2 * self.num_seqs + 1
        return self._part(start, 3 * self.num_copies).reshape(-1, 3)

    @property
    def block_tables(self) -> NDArray[np.int32]:
        """[S, B] padded with any ids"""
        start = 3 * (self.num_tokens + self.num_copies) + self.num_rows + 2 * self.num_seqs + 1
        return self._part(start, len(self.ints) - start).reshape(self.num_seqs, -1)

    def _part(self, start: int, length: int) -> NDArray[np.int32]:
        return np.frombuffer(self.ints, np.int32)[start : start + length]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw(DrawRule):
    """What a draw is a pure function of, besides its logits row. Its ``history`` is all tokens before it."""

    position: int  # index in the sequence of the token being drawn

    @classmethod
    def at(cls, rule: DrawRule, position: int) -> Draw:
        return cls(
            params=rule.params,
            random_stream=rule.random_stream,
            history=rule.history,
            prompt_len=rule.prompt_len,
            banned_token_ids=rule.banned_token_ids,
            position=position,
        )


@hot_record
class StepOutput:
    """What a backend returns for one ModelInput."""

    tokens: list[SampledToken | DrawFailure]  # one per draw, or why there is none
    row_logprobs: list[SampledToken | DrawFailure]  # one per target row
    forward_s: float
    sample_s: float
    gil_wait_s: float = 0.0  # how long the call then waited for the GIL, if it had released it


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheLayout:
    """Size of the paged cache that a backend allocates, for all layers."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """Memory of the machine that one tensor takes, besides its file, whose pages can be dropped at any time."""

    packed: int  # for as long as the backend lives
    loading: int  # while it is being packed, ``packed`` included


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """What a pass of a packed model must at least read and multiply, for a bound on its time."""

    layer_bytes: int  # packed weights that every step reads
    head_bytes: int  # the packed head, which a step with logits reads
    table_bytes: int  # an embedding that is not the head too: a step reads only its tokens' rows
    kv_bytes: int  # of one cached position, all layers
    quantised_macs: int  # multiply-adds of one token in linear layers with integer weights
    float_macs: int  # of one token in linear layers with other weights
    head_macs: int  # of one logit row
    head_is_quantised: bool
    attention_macs: int  # of one (query, visible position) pair, all heads and layers
    window: int | None  # positions that a query sees at most

    @property
    def weights_bytes(self) -> int:
        return self.layer_bytes + self.head_bytes + self.table_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpeed:
    """What the machine can do at best with the backend's threads, measured."""

    read_bytes_per_s: tuple[tuple[int, float], ...]  # (working set in bytes, rate), ascending by working set
    macs_per_s: Mapping[str, float]  # multiply-adds, register to register, by arithmetic: "float32", "int8", "bf16"


class Backend(ABC):
    """A device that runs models. The one writer of KV tensors and weights is the ModelRunner that owns it."""

    name: str  # "torch" | "native"
    device: str  # "cpu", "mps", "cuda", ...
    dtype: str  # of activations
    kv_dtype: str
    threads: int  # compute threads on the CPU
    fingerprint: str  # kernels and determinism mode, for system_fingerprint
    notify_fd: int = -1  # run() writes one byte to this once it computes without the GIL; -1: to none

    @abstractmethod
    def pack(self, tensor: WeightTensor, uses: frozenset[WeightUse]) -> Weight:
        """Bring one tensor into the layout the kernels stream. A tied embedding has two uses."""

    @abstractmethod
    def weight_bytes(self, shape: tuple[int, ...], encoding: Encoding, uses: frozenset[WeightUse]) -> WeightBytes:
        """What ``pack`` will take for such a tensor, told without touching it."""

    def kept_as(self, encoding: Encoding) -> str | None:
        """What matrices of this encoding become if ``pack`` makes something else of them; None: they stay."""
        return None

    @abstractmethod
    def kv_bytes_per_token(self, config: ModelConfig) -> int:
        """Bytes of K and V of one token over all layers, scales included."""

    @abstractmethod
    def allocate_kv_cache(self, layout: KVCacheLayout) -> int:
        """Allocate the paged cache (mapped, untouched until used) -> its bytes. ConfigError if it does not fit."""

    @abstractmethod
    def bind(self, model: Model, *, max_tokens: int, max_seqs: int) -> None:
        """Take the model to run, before there is a cache. max_tokens, max_seqs: bounds of T and S of any later step."""

    @abstractmethod
    def scratch_bytes(self) -> int:
        """Memory that steps within the bounds given to ``bind`` may touch besides weights and KV."""

    def device_free_bytes(self) -> int | None:
        """Memory that is free on a device with memory of its own, for the KV cache; None where it is the machine's."""
        return None

    @abstractmethod
    def run(self, step: ModelInput, draws: Sequence[DrawRule], targets: Sequence[tuple[int, int]] = ()) -> StepOutput:
        """One step: copies, KV writes, forward, draws.

        draws: for logit_rows[:len(draws)], each of the position after its row's. targets: (token id, number of
        alternatives) of the remaining logit rows, whose log-softmax is wanted at that token.
        """

    def model_cost(self) -> ModelCost | None:
        """What a step of the packed model must at least read and multiply; None where the backend does not tell."""
        return None

    def measure_machine(self) -> MachineSpeed | None:
        """Measure memory and arithmetic, for half a second, while no step runs; None where the backend cannot."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release threads and memory."""
