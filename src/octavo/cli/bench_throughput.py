"""Steady decoding and prefill, measured on a loaded engine, step by step, on the calling thread."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.cli.bound import Bound, decode_bound, prefill_bound
from octavo.core.errors import ConfigError, RequestFailed
from octavo.core.request import Submission
from octavo.core.sampling_params import SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.requests import make_requests
from octavo.kernels.base import MachineSpeed, ModelCost
from octavo.observability.trace import StepRecord

_ids = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One step. ``wall_s`` counts everything, scheduling and text too; forward and sample are the backend's own."""

    wall_s: float
    build_s: float  # arrays for the backend and its results, in Python
    forward_s: float
    sample_s: float
    tokens: int  # positions run
    context: float  # positions that its queries' last tokens see, mean over sequences

    @property
    def overhead_s(self) -> float:
        """What is not the backend's: mostly Python."""
        return self.wall_s - self.forward_s - self.sample_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """One measurement of a case."""

    steps: list[StepSample]
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """All repeats of a case, and the best that the machine could do."""

    kind: str  # "decode" | "prefill"
    streams: int
    context: int  # decode: positions that a token sees, as wished; prefill: tokens of the prompt
    mean_context: float  # as it was, over sequences and steps
    repeats: list[Repeat]
    bound_s: float | None  # of one decode step, or of the whole prefill; None where the backend tells nothing
    limit: str  # what the bound comes from: "memory", "arithmetic", or ""

    @property
    def name(self) -> str:
        if self.kind == "prefill":
            return f"prefill of {self.context:,}"
        return f"{self.streams} stream{'s' if self.streams > 1 else ''} at {self.context:,}"

    @property
    def tokens_per_s(self) -> float:
        """Median over the repeats."""
        return statistics.median(repeat.tokens_per_s for repeat in self.repeats)

    @property
    def bound_tokens_per_s(self) -> float | None:
        if self.bound_s is None:
            return None
        return (self.context if self.kind == "prefill" else self.streams) / self.bound_s

    @property
    def share_of_bound(self) -> float | None:
        """1 would be perfect; above 1, the machine was busier while it was measured than while it worked."""
        bound = self.bound_tokens_per_s
        return None if bound is None else self.tokens_per_s / bound


class ThroughputBench:
    """Runs cases on one engine. Prompts are random and seeded; every answer ignores the end token."""

    def __init__(self, engine: Engine, *, seed: int = 0, temperature: float = 0.0) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self._temperature = temperature
        self.cost: ModelCost | None = engine.runner.backend.model_cost()
        self.speed: MachineSpeed | None = engine.runner.backend.measure_machine()

    def warm_up(self) -> None:
        """A short answer, so that the first case meets warm code."""
        self._decode(1, min(32, self._engine.config.max_model_len // 2), 4)

    def decode(self, streams: int, context: int, steps: int, repeats: int) -> CaseResult:
        """``steps`` steps in which all streams decode, around ``context`` positions. ConfigError if they do not fit."""
        self._check_room(streams, context, steps)
        runs = [self._decode(streams, max(1, context - steps // 2), steps) for _ in range(repeats)]
        seen = statistics.fmean(step.context for run in runs for step in run)
        bound = self._decode_bound(streams, round(seen))  # of what ran, not of what was wished
        return CaseResult(
            kind="decode",
            streams=streams,
            context=context,
            mean_context=seen,
            repeats=[Repeat(steps=run, tokens_per_s=_rate(run)) for run in runs],
            bound_s=bound.seconds if bound else None,
            limit=bound.limit if bound else "",
        )

    def prefill(self, tokens: int, repeats: int) -> CaseResult:
        """A prompt of ``tokens`` tokens, up to its first token out. ConfigError if it does not fit."""
        self._check_room(1, tokens, 1)
        runs = [self._prefill(tokens) for _ in range(repeats)]
        bounds = self._prefill_bounds(tokens)
        return CaseResult(
            kind="prefill",
            streams=1,
            context=tokens,
            mean_context=statistics.fmean(step.context for run in runs for step in run),
            repeats=[Repeat(steps=run, tokens_per_s=_rate(run)) for run in runs],
            bound_s=sum(bound.seconds for bound in bounds) if bounds else None,
            limit=max(bounds, key=lambda bound: bound.seconds).limit if bounds else "",
        )

    def _decode(self, streams: int, prompt_tokens: int, steps: int) -> list[StepSample]:
        """The first ``steps`` steps in which every stream decodes; the streams are then ended."""
        engine, room = self._engine, self._engine.config.max_model_len - prompt_tokens
        request_ids = [self._submit(prompt_tokens, room) for _ in range(streams)]
        samples: list[StepSample] = []
        while len(samples) < steps:
            sample, record = self._step()
            if all(chunk.reason == "decode" for chunk in record.chunks) and len(record.chunks) == streams:
                samples.append(sample)
            if record.preempted or not engine.has_unfinished:
                raise ConfigError(
                    f"{streams} streams of {prompt_tokens} prompt tokens outgrew the KV pool of "
                    f"{engine.config.num_blocks * engine.config.block_size} tokens or --max-model-len "
                    f"{engine.config.max_model_len} before they had decoded {steps} steps together; raise "
                    "--kv-cache-memory or --max-num-batched-tokens, or take fewer streams"
                )
        for request_id in request_ids:
            engine.abort(request_id)
        return samples

    def _prefill(self, tokens: int) -> list[StepSample]:
        self._submit(tokens, 1)
        samples = []
        while self._engine.has_unfinished:
            samples.append(self._step()[0])
        return samples

    def _submit(self, prompt_tokens: int, max_tokens: int) -> str:
        vocabulary = self._engine.config.vocab_size
        [request] = make_requests(
            self._engine.config,
            Submission(
                request_id=f"bench-{next(_ids)}",
                prompt_token_ids=[self._random.randrange(vocabulary) for _ in range(prompt_tokens)],
                sampling=SamplingParams(temperature=self._temperature, seed=1, max_tokens=max_tokens, ignore_eos=True),
            ),
            arrival_s=time.monotonic(),
        )
        self._engine.submit([request])
        return request.request_id

    def _step(self) -> tuple[StepSample, StepRecord]:
        started = time.perf_counter()
        self._engine.step()
        wall_s = time.perf_counter() - started
        record = self._engine.tracer.steps(limit=1)[0]
        if record.failed:
            raise RequestFailed("a step of the engine failed; the log above says why")
        ends = [chunk.start + chunk.length for chunk in record.chunks]
        sample = StepSample(
            wall_s=wall_s,
            build_s=record.build_s,
            forward_s=record.forward_s,
            sample_s=record.sample_s,
            tokens=sum(chunk.length for chunk in record.chunks),
            context=statistics.fmean(ends),
        )
        return sample, record

    def _check_room(self, streams: int, context: int, steps: int) -> None:
        config, length = self._engine.config, context + steps
        if length > config.max_model_len:
            raise ConfigError(
                f"context {context} plus {steps} tokens is {length} but max_model_len is {config.max_model_len}; "
                "shorten them, or raise --max-model-len"
            )
        needed = streams * -(-length // config.block_size)
        if needed > config.num_blocks:
            raise ConfigError(
                f"{streams} streams of {length} tokens need {needed} KV blocks but the pool has {config.num_blocks}; "
                "raise --kv-cache-memory, or take fewer streams or a shorter context"
            )

    def _decode_bound(self, streams: int, context: int) -> Bound | None:
        if self.cost is None or self.speed is None:
            return None
        return decode_bound(self.cost, self.speed, streams=streams, context=context)

    def _prefill_bounds(self, tokens: int) -> list[Bound]:
        if self.cost is None or self.speed is None:
            return []
        chunk = self._engine.config.wish.max_num_batched_tokens
        return prefill_bound(self.cost, self.speed, tokens=tokens, chunk=chunk)


def _rate(steps: Sequence[StepSample]) -> float:
    """Tokens per second over whole steps."""
    return sum(step.tokens for step in steps) / sum(step.wall_s for step in steps)
