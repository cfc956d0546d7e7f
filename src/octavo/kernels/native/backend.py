"""The native backend: packed weights, a paged KV cache and a recorded program, all in C++ (csrc/)."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.core.plan import DrawFailure, DrawRule, SampledToken
from octavo.kernels.base import (
    Backend,
    DrawMasks,
    KVCacheLayout,
    MachineSpeed,
    Model,
    ModelCost,
    ModelInput,
    StepOutput,
    WeightBytes,
    WeightUse,
    check_hidden_rows,
    refuse_states,
)
from octavo.kernels.cost import CostLedger
from octavo.kernels.native.builder import ProgramBuilder
from octavo.kernels.native.draws import DrawPacker
from octavo.kernels.native.measure import measure_machine
from octavo.kernels.native.threads import default_threads
from octavo.weights.dequantise import Encoding, encoded_bytes
from octavo.weights.repack import REPACKED, to_i8_k
from octavo.weights.tensor import WeightTensor

Numerics = Literal["exact", "fast"]
Activations = Literal["auto", "int8", "bf16", "by rows"]
PackedWeight = _native.PackedMatrix | _native.Vector
_REPACKED_AT_ONCE = 8 << 20  # bytes
_FILE_PAGES = 32 << 20  # of the file that stay resident while it is being packed
_KV_KINDS = {"bfloat16": _native.KvKind.BF16, "float32": _native.KvKind.F32}
_FAILURES: dict[int, DrawFailure] = {
    -1: "not_finite",
    -2: "no_token_left",
}  # kNotFinite, kNoTokenLeft of csrc/sampling.h


class NativeBackend(Backend):
    """CPU kernels chosen at run time for this machine's instruction set; activations are float32.

    Under numerics "exact" a row's result, to the last bit, depends on that row alone: not on chunking, on the rows
    beside it, on block placement or on the number of threads (docs/kernels.md). With AMX, "fast" chooses the arithmetic
    by the number of rows; on other CPUs the two are the same kernels.
    """

    name = "native"
    device = "cpu"
    dtype = "float32"

    def __init__(
        self,
        config: ModelConfig,
        threads: int | None = None,
        numerics: Numerics = "exact",
        kv_dtype: str = "auto",
        *,
        fused: bool = True,
        activations: Activations = "auto",
    ) -> None:
        """threads: None takes one per physical core that this process may use. kv_dtype "auto" is bfloat16.

        For tests: fused=False runs every op apart, activations=... takes another instruction set's arithmetic. The
        environment variable OCTAVO_ISA pins an instruction set. Raises ``ConfigError`` for a value that this build or
        CPU does not have.
        """
        if numerics not in ("exact", "fast"):
            raise ConfigError(f"numerics is {numerics!r} but must be exact or fast")
        self.kv_dtype = "bfloat16" if kv_dtype == "auto" else kv_dtype
        if self.kv_dtype not in _KV_KINDS:
            raise ConfigError(f"kv_dtype is {kv_dtype!r} but the native backend has auto, bfloat16 and float32")
        try:
            arithmetic = numerics if activations == "auto" else activations
            self._context = _native.Context(threads or default_threads(), os.environ.get("OCTAVO_ISA", ""), arithmetic)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.isa, self.threads = self._context.isa, self._context.threads
        self.fingerprint = f"native-{self.isa}-{numerics}-{self.kv_dtype}"
        self._config, self._fused = config, fused
        self._packer = DrawPacker()
        self._mask_filler: ThreadPoolExecutor | None = None  # fills masks while run() computes without the GIL
        self._ledger = CostLedger()
        self._mapped: dict[int, mmap.mmap] = {}
        self._packed_since = 0  # bytes of file pages that packing has touched and not let go of
        self._kv: _native.KvCache | None = None
        self._program: _native.Program | None = None

    def pack(self, tensor: WeightTensor, uses: frozenset[WeightUse]) -> PackedWeight:
        """Vectors (norms, biases) as float32, matrices in panels of 16 rows (csrc/ops/types.h), values unchanged."""
        if uses & {"experts", "adapter"}:
            op = "expert_linear" if "experts" in uses else "adapter_linear"
            raise ConfigError(
                f"tensor {tensor.name} is for the op {op}, which the native backend does not have; use --backend torch"
            )
        if uses <= {"norm", "bias"}:
            vector = _native.Vector(tensor.to_float32().reshape(-1))
            self._ledger.add(uses, num_bytes=4 * vector.size, macs=0)
            return vector
        if len(tensor.shape) != 2:
            raise ConfigError(f"tensor {tensor.name} has shape {tensor.shape} but a matrix has two dimensions")
        self._note_mapping(tensor.data)
        try:
            matrix = self._pack_matrix(tensor)
        except ValueError as error:
            raise ConfigError(f"tensor {tensor.name}: {error}") from error
        self._packed_since += tensor.data.nbytes
        if self._packed_since >= _FILE_PAGES:
            self._drop_file_pages()
        rows, columns = matrix.shape
        is_quantised = matrix.reads_quantised(self._context)
        self._ledger.add(uses, num_bytes=matrix.num_bytes, macs=rows * columns, is_quantised=is_quantised)
        return matrix

    def weight_bytes(self, shape: tuple[int, ...], encoding: Encoding, uses: frozenset[WeightUse]) -> WeightBytes:
        """Vectors as float32; matrices as csrc/ops/types.h lays them out, rows padded to panels of 16."""
        if len(shape) != 2:
            size = 4 * math.prod(shape)
            return WeightBytes(packed=size, loading=2 * size)
        packed = _native.packed_size("I8_K" if encoding in REPACKED else encoding, *shape)
        # a reader may hand over a copy with its rows in another order
        repacking = _REPACKED_AT_ONCE if encoding in REPACKED else 0
        return WeightBytes(packed=packed, loading=packed + encoded_bytes(encoding, shape) + repacking)

    def kept_as(self, encoding: Encoding) -> str | None:
        return "int8 with a scale per 16" if encoding in REPACKED else None

    def _pack_matrix(self, tensor: WeightTensor) -> _native.PackedMatrix:
        """At once, or in slices of rows: what is repacked on the way, and what outgrows the file pages to keep."""
        rows, columns = tensor.shape
        is_repacked = tensor.encoding in REPACKED
        if not is_repacked and tensor.data.nbytes <= _FILE_PAGES:
            return _native.pack(self._context, tensor.encoding, rows, columns, tensor.data)
        matrix = _native.allocate("I8_K" if is_repacked else tensor.encoding, rows, columns)
        row_bytes = encoded_bytes(tensor.encoding, (columns,))
        # some 8 bytes per weight on the way to int8
        at_once = _REPACKED_AT_ONCE // (8 * columns) if is_repacked else _FILE_PAGES // row_bytes
        step = max(16, at_once // 16 * 16)
        for first in range(0, rows, step):
            taken = tensor.data[first * row_bytes : (first + step) * row_bytes]
            matrix.fill(self._context, first, to_i8_k(taken, tensor.encoding) if is_repacked else taken)
            if first + step < rows:
                self._drop_file_pages()
                self._note_mapping(tensor.data)
        return matrix

    def unpack(self, weight: _native.PackedMatrix) -> NDArray[np.float32]:
        """A packed matrix back to float32 [rows, columns]: equals ``WeightTensor.to_float32`` bit for bit."""
        unpacked: NDArray[np.float32] = weight.unpack(self._context)
        return unpacked

    def kv_bytes_per_token(self, config: ModelConfig, num_layers: int) -> int:
        kind = _KV_KINDS[self.kv_dtype]
        return _native.kv_token_bytes(kind, num_layers, config.num_kv_heads, config.head_dim)

    def allocate_kv_cache(self, layout: KVCacheLayout) -> int:
        refuse_states(layout)
        groups = [
            (group.layers, num_blocks, group.window)
            for group, num_blocks in zip(layout.groups, layout.num_blocks, strict=True)
        ]
        try:
            if max(layout.num_blocks) >= 1 << 31:
                raise MemoryError
            self._kv = _native.KvCache(
                _KV_KINDS[self.kv_dtype], groups, layout.block_size, layout.num_kv_heads, layout.head_dim
            )
        except MemoryError as error:
            size = sum(
                num_blocks * layout.block_size * self.kv_bytes_per_token(self._config, len(layers))
                for layers, num_blocks, _ in groups
            )
            raise ConfigError(
                f"a KV cache of {size:,} bytes does not fit in memory; lower --kv-cache-memory, --max-num-seqs or "
                f"--max-model-len"
            ) from error
        return self._kv.num_bytes

    def bind(self, model: Model, *, max_tokens: int, max_seqs: int) -> None:
        builder = ProgramBuilder(self._context, self._config, fused=self._fused)
        self._built = builder.build(model, max_tokens=max_tokens, max_seqs=max_seqs)
        self._program = self._built.program
        self._drop_file_pages()

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
        """Raises ``ValueError`` naming the array if the step could lead a kernel out of bounds."""
        assert self._program is not None, "bind() comes first"
        assert self._kv is not None, "allocate_kv_cache() comes first"
        records, lists = self._packer.pack(draws, history_lens)
        sizes = (step.num_tokens, step.num_rows, step.num_seqs, step.num_copies, step.num_groups)
        wanted = np.array(targets, np.int32) if targets else None
        num_hidden = max(step.num_rows - len(draws) - len(targets), 0) if hidden_rows else 0
        arrays, filling = (None, None) if masks is None else self._fill(masks, len(draws))
        try:
            rows, forward_s, sample_s, gil_wait_s = self._program.run(
                self._kv, step.ints, sizes, records, lists, wanted, self.notify_fd, num_hidden, arrays
            )
        finally:
            if filling is not None:
                filling.result()
        # without keywords: see hot_record
        tokens = [
            (SampledToken(row) if row >= 0 else _FAILURES[row]) if isinstance(row, int) else SampledToken(*row)
            for row in rows
        ]
        return StepOutput(
            tokens=tokens[: len(draws)],
            row_logprobs=tokens[len(draws) :],
            forward_s=forward_s,
            sample_s=sample_s,
            gil_wait_s=gil_wait_s,
            hidden=self._program.hidden(check_hidden_rows(step, hidden_rows)) if hidden_rows else None,
        )

    def _fill(self, masks: DrawMasks, num_draws: int) -> tuple[_native.Masks, Future[None]]:
        """What the draws wait for, and a thread that writes it while they are computed."""
        if self._mask_filler is None:
            self._mask_filler = ThreadPoolExecutor(1, "octavo-masks")
        bits, filled = masks.empty(self._config.vocab_size), _native.Latch()
        rows = np.full(num_draws, -1, np.int32)
        rows[masks.draws] = range(len(bits))

        def fill() -> None:
            try:
                masks.fill(bits)
            finally:
                filled.open()

        return (rows, bits, filled), self._mask_filler.submit(fill)

    def scratch_bytes(self) -> int:
        assert self._program is not None, "bind() comes first"
        return self._program.scratch_bytes

    def model_cost(self) -> ModelCost:
        return self._ledger.cost(self._config, kv_bytes=self.kv_bytes_per_token(self._config, self._config.num_layers))

    def measure_machine(self) -> MachineSpeed:
        return measure_machine(self._context)

    def close(self) -> None:
        """Release threads, weights and memory; idempotent."""
        self._program = self._kv = None
        if self._mask_filler is not None:
            self._mask_filler.shutdown()
        self.__dict__.pop("_built", None)
        self.__dict__.pop("_ledger", None)
        self.__dict__.pop("_context", None)

    def _drop_file_pages(self) -> None:
        """What is packed need not stay resident as pages of the file too."""
        for mapping in self._mapped.values():
            mapping.madvise(mmap.MADV_DONTNEED)
        self._mapped.clear()
        self._packed_since = 0

    def _note_mapping(self, data: NDArray[np.uint8]) -> None:
        """Remember the file mapping under an array, to let go of its pages after packing."""
        base: object = data
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, memoryview):
            base = base.obj
        if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            self._mapped[id(base)] = base
