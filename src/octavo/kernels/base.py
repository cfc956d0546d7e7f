"""The op seam: what a model may ask of a backend, and what the engine hands to one each step.

A model is written once against ``Ops`` and never looks inside an ``Array``. The torch backend runs each op at once; the
native backend hands out symbolic arrays the first time, records a program, and replays it with one call per step.
Therefore model code may not branch on a number of tokens, sequences or rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.core.cache_group import CacheGroup
from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig, RopeTable
from octavo.core.plan import DrawFailure, DrawRule, SampledToken
from octavo.core.records import hot_record
from octavo.weights.dequantise import Encoding
from octavo.weights.tensor import WeightTensor

Array = Any  # a backend's activation array: opaque to models
Weight = Any  # a backend's packed weight: opaque to models
Activation = Literal["silu", "gelu", "gelu_erf"]  # gelu: its tanh approximation; gelu_erf: gelu itself
#: head: the matrix of the logits; experts, adapter: matrices [*, N, K] one after the other, of which a row meets some
WeightUse = Literal["linear", "embedding", "head", "norm", "bias", "experts", "adapter"]
Routing = Any  # a backend's choice of experts for each row: opaque to models


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionScale:
    """Queries that grow with their position p: times 1 + beta * ln(1 + floor((p + shift) / length))."""

    beta: float
    length: int  # positions of one step
    shift: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """How a row chooses k of E experts from its router logits, and what their results weigh.

    Logits become scores. Where experts form groups, only the best groups stay; a group ranks by the sum of its best
    scores. The k best scores are chosen, the lowest expert first among equals; their weights are those scores.
    """

    num_chosen: int  # k
    score: Literal["softmax", "sigmoid"] = "softmax"  # softmax over all E
    normalise: bool = True  # the weights of a row are divided by their sum
    scale: float = 1.0  # and then multiplied by this
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_best: int = 2  # so many scores of a group are summed for its rank


class Ops(Protocol):
    """The ops of one forward pass. T tokens run, R logit rows are wanted; H query heads, H_kv KV heads, D head_dim."""

    token_ids: Array  # [T]
    positions: Array  # [T]

    def embedding(self, table: Weight, token_ids: Array) -> Array:
        """Rows of ``table`` [vocab, hidden] -> [T, hidden]."""
        ...

    def rms_norm(self, x: Array, weight: Weight, eps: float, num_heads: int = 1) -> Array:
        """x / sqrt(mean(x^2) + eps) * weight (Zhang, Sennrich 2019); arithmetic in float32.

        x [T, num_heads * D], weight [D]: each head by itself. A file whose gains are 1 + its numbers has them added
        when it is read, in float32.
        """
        ...

    def layer_norm(self, x: Array, weight: Weight, bias: Weight | None, eps: float) -> Array:
        """(x - mean(x)) / sqrt(var(x) + eps) * weight (+ bias) of rows [T, N] (Ba et al. 2016); in float32."""
        ...

    def linear(self, x: Array, weight: Weight, bias: Weight | None = None) -> Array:
        """x [T, K] @ weight [N, K]^T (+ bias [N]) -> [T, N]."""
        ...

    def rope(self, x: Array, positions: Array, num_heads: int, table: RopeTable) -> Array:
        """Rotate each head of x [T, num_heads * D] by its position; pairs i, i + dim/2 of the leading table.dim.

        kernels/reference/rope.py makes the rotations of a table. Weights whose pairs are neighbours (2i, 2i + 1) have
        their rows put in this order when they are read.
        """
        ...

    def scale_by_position(self, x: Array, positions: Array, scale: PositionScale) -> Array:
        """Each row of x [T, N] times its position's factor."""
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
        """activation(gate) * up, elementwise [T, N]."""
        ...

    def activation(self, x: Array, activation: Activation) -> Array:
        """activation(x), elementwise [T, N]."""
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

    def route(self, logits: Array, rule: RoutingRule, correction: Weight | None = None) -> Routing:
        """Each row's experts from its router logits [T, E], in float32. A row's choice depends on that row alone.

        correction [E]: added to the scores for the choice, not to the weights (DeepSeek-V3: arXiv:2412.19437, 2.1.2).
        """
        ...

    def expert_linear(self, x: Array, weight: Weight, routing: Routing, bias: Weight | None = None) -> Array:
        """Rows [T, K] or [T, k, K] times their experts' matrices [E, N, K] (, plus biases [E, N]) -> [T, k, N].

        Rows of one expert run together; the weights of an expert that no row has chosen are not touched.
        """
        ...

    def combine(self, x: Array, routing: Routing) -> Array:
        """Results of a row's experts [T, k, N], each times its weight, added up in the order of rank -> [T, N]."""
        ...

    def adapter_linear(self, y: Array, x: Array, a: Weight, b: Weight, adapter_rows: Array) -> Array:
        """y [T, N] + (x [T, K] @ a[i]^T) @ b[i]^T, i the adapter of the row (LoRA: Hu et al. 2021, arXiv:2106.09685).

        a [A, r, K], b [A, N, r] with the adapter's scale in it; ranks below r are filled up with zeros. adapter_rows
        [T]: -1 for a row without adapter, which costs nothing and stays what it is.
        """
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

    One array, since each that Python makes and hands over costs as much as the numbers of several sequences. Slots,
    block tables and copies are those of each of G cache groups (``KVCacheLayout.groups``).
    """

    ints: array[int]  # int32: the parts below, one after the other
    num_tokens: int  # T
    num_rows: int  # R
    num_seqs: int  # S
    num_copies: int  # C
    num_one_query_seqs: int
    num_groups: int = 1  # G

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
        """Of the parts, each of the length that its property below names; slots and tables group by group."""
        starts, rows, tokens, seen = list(query_starts), list(logit_rows), list(token_ids), list(context_lens)
        parts = (tokens, positions, slot_mapping, rows, starts, seen, *copies, *block_tables)  # in the layout's order
        ones = sum(end - start == 1 for start, end in pairwise(starts))
        ints = array("i", map(int, chain.from_iterable(parts)))
        return cls(ints, len(tokens), len(rows), len(seen), len(copies), ones, len(block_tables) // max(len(seen), 1))

    def layout(self) -> tuple[tuple[str, int], ...]:
        """The parts of ``ints`` in their order, and how many each has. csrc/step.cpp takes them so; a test compares."""
        parts = (
            ("token_ids", self.num_tokens),
            ("positions", self.num_tokens),
            ("slot_mapping", self.num_groups * self.num_tokens),
            ("logit_rows", self.num_rows),
            ("query_starts", self.num_seqs + 1),
            ("context_lens", self.num_seqs),
            ("copies", 4 * self.num_copies),
        )
        return (*parts, ("block_tables", len(self.ints) - sum(length for _, length in parts)))

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[T]"""
        return self._part("token_ids")

    @property
    def positions(self) -> NDArray[np.int32]:
        """[T]"""
        return self._part("positions")

    @property
    def slot_mapping(self) -> NDArray[np.int32]:
        """[G, T] block_id * block_size + offset; -1 writes nothing"""
        return self._part("slot_mapping").reshape(self.num_groups, -1)

    @property
    def logit_rows(self) -> NDArray[np.int32]:
        """[R] indices into T: first the rows of draws, then those of prompt logprobs"""
        return self._part("logit_rows")

    @property
    def query_starts(self) -> NDArray[np.int32]:
        """[S + 1] sequence s runs tokens [query_starts[s], query_starts[s + 1])"""
        return self._part("query_starts")

    @property
    def context_lens(self) -> NDArray[np.int32]:
        """[S] positions visible to the last query, itself included"""
        return self._part("context_lens")

    @property
    def copies(self) -> NDArray[np.int32]:
        """[C, 4] (group, src block, dst block, num_tokens), before any KV write"""
        return self._part("copies").reshape(-1, 4)

    @property
    def block_tables(self) -> NDArray[np.int32]:
        """[G, S, B] padded with any ids; what a window group has given back is -1"""
        return self._part("block_tables").reshape(self.num_groups, self.num_seqs, -1)

    def _part(self, name: str) -> NDArray[np.int32]:
        start = 0
        for part, length in self.layout():
            if part == name:
                break
            start += length
        return np.frombuffer(self.ints, np.int32)[start : start + length]


def check_hidden_rows(step: ModelInput, hidden_rows: Sequence[int]) -> Sequence[int]:
    """Raises ``ValueError`` for a row that the step does not have."""
    for row in hidden_rows:
        if not 0 <= row < step.num_rows:
            raise ValueError(f"hidden_rows has {row} but the step has {step.num_rows} logit rows")
    return hidden_rows


@hot_record
class DrawMasks:
    """The tokens that some draws of a step may take, told while its forward pass runs."""

    draws: Sequence[int]  # which, ascending
    #: Fills zeros [len(draws), ceil(vocab / 32)]: bit t % 32 of word t // 32 says that token t may be drawn. Any thread
    #: may call it, once, and must before ``run`` returns or raises.
    fill: Callable[[NDArray[np.uint32]], None]

    def empty(self, vocab_size: int) -> NDArray[np.uint32]:
        """What ``fill`` takes."""
        return np.zeros((len(self.draws), -(-vocab_size // 32)), np.uint32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw(DrawRule):
    """What a draw is a pure function of, besides its logits row. Its ``history`` is all tokens before it."""

    position: int  # index in the sequence of the token being drawn
    mask: NDArray[np.uint32] | None = None  # a row of DrawMasks; None: all may be drawn

    @classmethod
    def at(
        cls,
        rule: DrawRule,
        position: int,
        history: Sequence[int] | None = None,
        mask: NDArray[np.uint32] | None = None,
    ) -> Draw:
        """history: how much of the rule's history stands before it; None: all."""
        return cls(
            params=rule.params,
            random_stream=rule.random_stream,
            history=rule.history if history is None else history,
            prompt_len=rule.prompt_len,
            banned_token_ids=rule.banned_token_ids,
            position=position,
            mask=mask,
        )


@hot_record
class StepOutput:
    """What a backend returns for one ModelInput."""

    tokens: list[SampledToken | DrawFailure]  # one per draw, or why there is none
    row_logprobs: list[SampledToken | DrawFailure]  # one per target row
    forward_s: float
    sample_s: float
    gil_wait_s: float = 0.0  # how long the call then waited for the GIL, if it had released it
    hidden: NDArray[np.float32] | None = None  # [len(hidden_rows), hidden], if rows were asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheLayout:
    """Sizes of the paged cache that a backend allocates: for each group of layers, so many blocks of its own."""

    groups: tuple[CacheGroup, ...]  # with layers 0, 1, ... shared out among them
    num_blocks: tuple[int, ...]  # of each group
    block_size: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def full(
        cls, *, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> KVCacheLayout:
        """Of a model whose layers all keep everything."""
        group = CacheGroup(kind="full", layers=tuple(range(num_layers)))
        return cls(
            groups=(group,),
            num_blocks=(num_blocks,),
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )


def refuse_states(layout: KVCacheLayout) -> None:
    """Raise ConfigError if a layer keeps a recurrent state: no op of the seam reads or writes one."""
    for group in layout.groups:
        if group.kind == "state":
            raise ConfigError(f"layers {group.layers} keep a recurrent state, which this backend has no op for")


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
    windows: tuple[int | None, ...]  # of each layer: positions that a query sees at most; layers are alike otherwise

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
    def kv_bytes_per_token(self, config: ModelConfig, num_layers: int) -> int:
        """Bytes of K and V of one token over so many layers, scales included."""

    @abstractmethod
    def allocate_kv_cache(self, layout: KVCacheLayout) -> int:
        """Allocate the paged cache (mapped, untouched until used) -> its bytes.

        Raises ConfigError if it does not fit, or if a group is of a kind that no op of the backend works on.
        """

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
    def run(
        self,
        step: ModelInput,
        draws: Sequence[DrawRule],
        targets: Sequence[tuple[int, int]] = (),
        *,
        history_lens: Sequence[int] = (),
        masks: DrawMasks | None = None,
        hidden_rows: Sequence[int] = (),
    ) -> StepOutput:
        """One step: copies, KV writes, forward, draws.

        draws: for logit_rows[:len(draws)], each of the position after its row's; those of one sequence side by side.
        targets: (token id, number of alternatives) of the logit rows after those, whose log-softmax is wanted at that
        token. history_lens: per draw, how much of its rule's history stands before it; () all. masks: what some draws
        may take; a row without a bit is a draw without a token ("no_token_left"). hidden_rows: indices into logit_rows
        whose ``Model.hidden`` is wanted; rows beyond draws and targets have no logits computed.
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
