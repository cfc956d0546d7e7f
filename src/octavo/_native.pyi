"""octavo's CPU kernels (csrc/bindings.cpp)."""

from array import array
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

DRAW_BYTES: int

class Domain(Enum):
    TOKENS = 0
    ROWS = 1

class Section(Enum):
    BODY = 0
    HEAD = 1

class Gate(Enum):
    SILU = 0
    GELU = 1
    GELU_ERF = 2

class RowOp(Enum):
    EMBEDDING = 0
    RMS_NORM = 1
    LAYER_NORM = 2
    QUANTISE = 3
    ROPE = 4
    WRITE_KV = 5
    GATED_MUL = 6
    ACTIVATION = 7
    ADD = 8
    SCALE = 9
    SCALE_BY_POSITION = 10
    SELECT_ROWS = 11
    SOFT_CAP = 12

class Context:
    def __init__(self, threads: int, isa: str = "", numerics: str = "exact") -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...

class PackedMatrix:
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def kind(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def reads_quantised(self, context: Context) -> bool: ...
    def fill(self, context: Context, first_row: int, data: NDArray[np.uint8]) -> None: ...
    def unpack(self, context: Context) -> NDArray[np.float32]: ...

class Vector:
    def __init__(self, values: NDArray[np.float32]) -> None: ...
    @property
    def size(self) -> int: ...

class KvKind(Enum):
    F32 = 0
    BF16 = 1

class KvCache:
    def __init__(
        self,
        kind: KvKind,
        groups: Sequence[tuple[Sequence[int], int, int]],
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None: ...
    @property
    def num_bytes(self) -> int: ...
    def poison(self, block: int, group: int = 0) -> None: ...

class Program:
    def __init__(
        self,
        context: Context,
        vocab_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None: ...
    def rotation(self, frequencies: Sequence[float], factor: float) -> int: ...
    def buffer(self, domain: Domain, width: int, quantised: bool = False) -> int: ...
    def row_op(
        self,
        kind: RowOp,
        section: Section,
        domain: Domain,
        a: int = -1,
        b: int = -1,
        out: int = -1,
        value: float = 0.0,
        count: int = 0,
        gate: Gate = Gate.SILU,
        weight: Vector | None = None,
        bias: Vector | None = None,
        table: PackedMatrix | None = None,
        rotation: int = 0,
        shift: int = 0,
    ) -> None: ...
    def linear(self, section: Section, domain: Domain, parts: Sequence[dict[str, Any]]) -> None: ...
    def attention(
        self, layer: int, q: int, out: int, scale: float, window: int, soft_cap: float, quantised_out: int = -1
    ) -> None: ...
    def finish(self, hidden: int, rows: int, logits: int, max_tokens: int, max_seqs: int) -> None: ...
    @property
    def scratch_bytes(self) -> int: ...
    def read(self, buffer: int, rows: int) -> NDArray[np.float32]: ...
    def hidden(self, rows: Sequence[int]) -> NDArray[np.float32]: ...
    def run(
        self,
        kv: KvCache,
        ints: array[int],
        sizes: tuple[int, int, int, int, int],
        draws: bytes,
        lists: Sequence[NDArray[np.int32] | NDArray[np.float32]],
        targets: NDArray[np.int32] | None,
        notify_fd: int,
        num_hidden: int = 0,
        masks: Masks | None = None,
    ) -> tuple[list[int | tuple[int, float, tuple[tuple[int, float], ...]]], float, float, float]: ...

class Latch:
    def open(self) -> None: ...

Masks = tuple[NDArray[np.int32], NDArray[np.uint32], Latch]

def step_layout(ints: array[int], sizes: tuple[int, int, int, int, int]) -> list[tuple[str, int]]: ...
def available_isas() -> list[str]: ...
def kv_token_bytes(kind: KvKind, num_layers: int, num_kv_heads: int, head_dim: int) -> int: ...
def pack(context: Context, encoding: str, rows: int, cols: int, data: NDArray[np.uint8]) -> PackedMatrix: ...
def allocate(encoding: str, rows: int, cols: int) -> PackedMatrix: ...
def packed_size(encoding: str, rows: int, cols: int) -> int: ...
def read_bandwidths(context: Context, sizes: Sequence[int], seconds: float) -> list[float]: ...
def multiply_add_rates(context: Context, seconds: float) -> list[tuple[str, float]]: ...
