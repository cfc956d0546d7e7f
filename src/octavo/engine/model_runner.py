"""Runs plans on a backend. Owns the weights and the KV tensors through it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from octavo.core.config import StepMode
from octavo.core.plan import DrawFailure, DrawRule, SampledToken, ScheduledChunk, StepPlan, StepResult
from octavo.core.sampling_params import SamplingParams
from octavo.engine.batch import build_batch
from octavo.engine.matchers import Matchers
from octavo.kernels.base import Backend, ModelInput


class ModelRunner:
    """Runs a plan's chunks in one pass ("mixed"), or decodes and longer chunks as two ("split", for comparison)."""

    def __init__(
        self, backend: Backend, *, block_size: int, num_groups: int = 1, step_mode: StepMode = "mixed"
    ) -> None:
        """num_groups: cache groups of the model."""
        self._backend = backend
        self._block_size = block_size
        self._num_groups = num_groups
        self._step_mode = step_mode
        self.matchers = Matchers()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run every chunk of the plan, block copies first. An exception means that nothing was committed."""
        started = time.perf_counter()
        chunks = plan.chunks
        tokens: list[tuple[SampledToken, ...]] = [()] * len(chunks)
        prompt_logprobs: list[list[SampledToken]] | None = None
        failed: dict[int, DrawFailure] = {}
        forward_s = sample_s = gil_wait_s = 0.0
        copies = plan.block_copies
        for first, last in self._passes(chunks):
            part = chunks[first:last]
            batch = build_batch(part, copies, self._block_size)
            copies = ()
            masks = self.matchers.masks(part)
            output = self._backend.run(
                batch.step, batch.draws, batch.targets, history_lens=batch.history_lens, masks=masks
            )
            for chunk, token in zip(batch.draw_chunks, output.tokens, strict=True):
                index = first + chunk
                if isinstance(token, str):
                    failed.setdefault(index, token)
                elif not failed or index not in failed:  # what stands behind a draw that failed does not count
                    tokens[index] = (*tokens[index], token) if tokens[index] else (token,)
            for chunk, token in zip(batch.target_chunks, output.row_logprobs, strict=True):
                if prompt_logprobs is None:
                    prompt_logprobs = [[] for _ in chunks]
                if isinstance(token, str):
                    failed[first + chunk] = token
                else:
                    prompt_logprobs[first + chunk].append(token)
            forward_s += output.forward_s
            sample_s += output.sample_s
            gil_wait_s += output.gil_wait_s
        errors: dict[int, str] = {}
        for chunk in failed:
            if (error := self.matchers.error(chunks[chunk].request_id)) is not None:
                failed[chunk], errors[chunk] = "matcher_raised", error
        return StepResult(
            step_id=plan.step_id,
            tokens=tuple(tokens),
            prompt_logprobs=tuple(map(tuple, prompt_logprobs)) if prompt_logprobs is not None else (),
            failed=failed,
            errors=errors,
            build_s=time.perf_counter() - started - forward_s - sample_s,
            forward_s=forward_s,
            sample_s=sample_s,
            gil_wait_s=gil_wait_s,
        )

    @property
    def notify_fd(self) -> int:
        """File descriptor that gets a byte when a step's kernels begin to run without the GIL; -1: none."""
        return self._backend.notify_fd

    @notify_fd.setter
    def notify_fd(self, fd: int) -> None:
        self._backend.notify_fd = fd

    @property
    def backend(self) -> Backend:
        """Who computes. Only the thread that steps the engine may use it."""
        return self._backend

    def _passes(self, chunks: Sequence[ScheduledChunk]) -> list[tuple[int, int]]:
        """Half-open ranges of chunks, one per pass: [0, n), or [0, ones) and [ones, n)."""
        count = len(chunks)
        if self._step_mode == "mixed":
            return [(0, count)] if count else []
        ones = sum(len(chunk.token_ids) == 1 for chunk in chunks)
        return [(first, last) for first, last in ((0, ones), (ones, count)) if last > first]

    def warm_up(self, max_tokens: int) -> None:
        """Run one throw-away pass that writes no KV, so that the first request meets warm code and pages.

        max_tokens: positions that a step may have; the pass takes a block's worth if that is less
        """
        num_tokens = min(self._block_size, max_tokens)
        step = ModelInput.of(
            token_ids=[0] * num_tokens,
            positions=range(num_tokens),
            slot_mapping=[-1] * num_tokens * self._num_groups,
            logit_rows=[num_tokens - 1],
            query_starts=[0, num_tokens],
            context_lens=[num_tokens],
            block_tables=[[0]] * self._num_groups,
        )
        self._backend.run(step, [DrawRule(params=SamplingParams(temperature=0.0), random_stream=0)])

    def close(self) -> None:
        self._backend.close()
