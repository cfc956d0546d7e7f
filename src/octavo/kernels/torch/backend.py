"""The torch backend: any device that torch has, eager, readable; the oracle of the other backends."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.core.plan import DrawFailure, DrawRule, SampledToken
from octavo.kernels.base import (
    Backend,
    Draw,
    DrawMasks,
    KVCacheLayout,
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
from octavo.kernels.torch.attention import MAX_GATHER_ROWS
from octavo.kernels.torch.ops import Planes, Rotations, TorchOps, layer_planes
from octavo.kernels.torch.sampling import row_logprobs, sample
from octavo.weights.dequantise import GROUP_LAYOUT, Encoding, encoded_bytes
from octavo.weights.tensor import WeightTensor

TARGET_SLICE_BYTES = 32 << 20  # logits of prompt-logprob rows that exist at a time

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchBackend(Backend):
    """Runs each op at once on ``device``; activations, matrices and KV in ``dtype``.

    KV cache: [layers, 2, blocks, block_size, kv_heads, head_dim], allocated and untouched until written.
    Scheduling changes a row's rounding (a matrix product of another shape adds in another order), so tokens are equal
    within the dtype's tolerance whatever the schedule; bit for bit is the native backend's promise.
    """

    name = "torch"

    def __init__(
        self, config: ModelConfig, *, device: str = "auto", dtype: str = "auto", threads: int | None = None
    ) -> None:
        """Raises ``ConfigError`` for a device that this machine or this torch does not have.

        threads: compute threads on the CPU; process-wide, since torch has one pool. None leaves torch's own choice.
        """
        self.device = _resolve_device(device)
        self.dtype = _resolve_dtype(dtype, self.device)
        self.kv_dtype = self.dtype
        self.fingerprint = f"torch-{torch.__version__}-{self.device}-{self.dtype}"
        if threads is not None:
            torch.set_num_threads(threads)
        self.threads = torch.get_num_threads()
        self._dtype = DTYPES[self.dtype]
        self._config = config
        self._rotations: Rotations = {}
        self._layout: KVCacheLayout | None = None
        self._ledger = CostLedger()
        self._kv_caches: list[torch.Tensor] = []
        self._planes: Planes = []
        self._model: Model | None = None

    def pack(self, tensor: WeightTensor, uses: frozenset[WeightUse]) -> torch.Tensor:
        """Dequantise to the backend's dtype, row-major; norm gains stay float32, as the norm's arithmetic is."""
        dtype = torch.float32 if uses == {"norm"} else self._dtype
        packed = torch.from_numpy(tensor.to_float32()).to(self.device, dtype)
        self._ledger.add(uses, num_bytes=packed.nbytes, macs=packed.numel())
        return packed

    def weight_bytes(self, shape: tuple[int, ...], encoding: Encoding, uses: frozenset[WeightUse]) -> WeightBytes:
        """Dequantised to float32 first, then brought into the dtype, and on cuda out of the machine's memory."""
        dtype = torch.float32 if uses == {"norm"} else self._dtype
        size, whole = math.prod(shape) * dtype.itemsize, 4 * math.prod(shape)
        packed = 0 if self.device == "cuda" else size
        encoded = encoded_bytes(encoding, shape)  # a reader may hand over a copy with its rows in another order
        return WeightBytes(packed=packed, loading=whole + encoded + (packed if dtype != torch.float32 else 0))

    def kept_as(self, encoding: Encoding) -> str | None:
        return self.dtype if GROUP_LAYOUT[encoding][0] > 1 else None

    def kv_bytes_per_token(self, config: ModelConfig, num_layers: int) -> int:
        return 2 * num_layers * config.num_kv_heads * config.head_dim * self._dtype.itemsize

    def allocate_kv_cache(self, layout: KVCacheLayout) -> int:
        refuse_states(layout)
        shapes = [
            (len(group.layers), 2, num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim)
            for group, num_blocks in zip(layout.groups, layout.num_blocks, strict=True)
        ]
        try:
            self._kv_caches = [torch.empty(shape, dtype=self._dtype, device=self.device) for shape in shapes]
        except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU allocator raises the base class
            size = sum(torch.Size(shape).numel() for shape in shapes) * self._dtype.itemsize
            raise ConfigError(
                f"a KV cache of {size:,} bytes does not fit on {self.device}; lower --kv-cache-memory, "
                f"--max-num-seqs or --max-model-len"
            ) from error
        self._layout, self._planes = layout, layer_planes(self._kv_caches, layout.groups)
        return sum(cache.nbytes for cache in self._kv_caches)

    def bind(self, model: Model, *, max_tokens: int, max_seqs: int) -> None:
        """Take the model. Nothing is sized ahead, torch allocates per step: the bounds only guard against our bugs."""
        self._model, self._max_tokens, self._max_seqs = model, max_tokens, max_seqs

    def scratch_bytes(self) -> int:
        """An estimate: what a layer keeps of each token at once, float32 logits of the draws three times, attention's
        gathered keys and values. Score matrices of long contexts come out of the memory that the pool leaves.
        """
        config = self._config
        widths = 6 * config.hidden_size + 3 * config.intermediate_size
        logits = 3 * 4 * self._max_seqs * config.vocab_size + TARGET_SLICE_BYTES
        gathered = 2 * 2 * MAX_GATHER_ROWS * config.head_dim * 4
        return self._max_tokens * widths * self._dtype.itemsize + logits + gathered

    def device_free_bytes(self) -> int | None:
        return torch.cuda.mem_get_info()[0] if self.device == "cuda" else None

    @torch.inference_mode()
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
        assert self._model is not None, "bind() comes first"
        assert self._layout is not None, "allocate_kv_cache() comes first"
        assert step.num_tokens <= self._max_tokens
        assert step.num_seqs <= self._max_seqs
        num_logits = len(draws) + len(targets)
        assert step.num_rows == num_logits or (hidden_rows and step.num_rows > num_logits)
        check_hidden_rows(step, hidden_rows)
        started = time.perf_counter()
        if self.notify_fd >= 0:
            with suppress(BlockingIOError):  # full: whoever reads has been told already
                os.write(self.notify_fd, b"\0")
        self._copy_blocks(step)
        ops = TorchOps(step, self._planes, self._layout, self._rotations, self.device)
        hidden = self._model.hidden(ops)
        logits = self._model.head(ops, hidden[: len(draws)]) if draws else None
        placed = self._placed(step, draws, history_lens, masks)  # on the host, while a device computes
        self._synchronize()
        forward_done = time.perf_counter()
        tokens = sample(logits, placed) if logits is not None else []
        logprobs = self._target_logprobs(ops, hidden[len(draws) : num_logits], targets)
        return StepOutput(
            tokens=tokens,
            row_logprobs=logprobs,
            forward_s=forward_done - started,
            sample_s=time.perf_counter() - forward_done,
            hidden=hidden[list(hidden_rows)].float().cpu().numpy() if hidden_rows else None,
        )

    def model_cost(self) -> ModelCost:
        return self._ledger.cost(self._config, kv_bytes=self.kv_bytes_per_token(self._config, self._config.num_layers))

    def close(self) -> None:
        """Let go of the KV cache and the model."""
        self._kv_caches, self._planes, self._model, self._layout = [], [], None, None

    def _copy_blocks(self, step: ModelInput) -> None:
        for group, source, destination, num_tokens in step.copies.tolist():
            cache = self._kv_caches[group]
            cache[:, :, destination, :num_tokens] = cache[:, :, source, :num_tokens]

    def _target_logprobs(
        self, ops: TorchOps, hidden: torch.Tensor, targets: Sequence[tuple[int, int]]
    ) -> list[SampledToken | DrawFailure]:
        """In slices: logits of a whole prompt would be [prompt, vocab], gigabytes."""
        assert self._model is not None
        rows = max(1, TARGET_SLICE_BYTES // (4 * self._config.vocab_size))
        found: list[SampledToken | DrawFailure] = []
        for start in range(0, len(targets), rows):
            logits = self._model.head(ops, hidden[start : start + rows])
            found += row_logprobs(logits, targets[start : start + rows])
        return found

    def _placed(
        self, step: ModelInput, draws: Sequence[DrawRule], history_lens: Sequence[int], masks: DrawMasks | None
    ) -> list[Draw]:
        """Each draw with its position, the tokens before it (a view of the one array of its sequence) and its mask."""
        positions = (step.positions[step.logit_rows] + 1).tolist()
        histories: dict[int, Any] = {
            id(rule.history): np.asarray(rule.history, np.int64) for rule in draws if rule.params.needs_history
        }
        seen = [histories.get(id(rule.history), ()) for rule in draws]
        if history_lens:
            seen = [history[:length] for history, length in zip(seen, history_lens, strict=True)]
        rows: dict[int, NDArray[np.uint32]] = {}
        if masks is not None:
            bits = masks.empty(self._config.vocab_size)
            masks.fill(bits)
            rows = dict(zip(masks.draws, bits, strict=True))
        return list(map(Draw.at, draws, positions, seen, map(rows.get, range(len(draws)))))

    def _synchronize(self) -> None:
        """Wait for the device, so that forward_s means the forward pass."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        elif self.device == "mps":
            torch.mps.synchronize()


def _resolve_device(wish: str) -> str:
    available = {"cpu": True, "mps": torch.backends.mps.is_available(), "cuda": torch.cuda.is_available()}
    if wish == "auto":
        return next(device for device in ("cuda", "mps", "cpu") if available[device])
    if not available.get(wish, False):
        have = ", ".join(device for device, there in available.items() if there)
        raise ConfigError(f"device is {wish!r} but torch {torch.__version__} here has only {have}; use --device auto")
    return wish


def _resolve_dtype(wish: str, device: str) -> str:
    """auto: float32 on the CPU (the oracle; without AMX or AVX-512 BF16 narrower types are also slower), bfloat16 on
    cuda, and on mps from macOS 14, the first whose MPS has it; float32 on older ones.
    """
    if wish != "auto":
        if wish not in DTYPES:
            raise ConfigError(f"dtype is {wish!r} but must be auto, {', '.join(DTYPES)}")
        if wish == "bfloat16" and device == "mps" and not torch.backends.mps.is_macos_or_newer(14, 0):
            raise ConfigError("dtype bfloat16 on mps needs macOS 14 or newer; use --dtype float16")
        return wish
    if device == "cpu" or (device == "mps" and not torch.backends.mps.is_macos_or_newer(14, 0)):
        return "float32"
    return "bfloat16"
