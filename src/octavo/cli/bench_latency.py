"""Requests that arrive over time, on a loaded engine: when their tokens come out."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.cli.distributions import Lengths, distribution
from octavo.core.errors import ConfigError, RequestFailed
from octavo.core.request import Submission
from octavo.core.sampling_params import SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.requests import make_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Who asks what, when: a pure function of its fields.

    ``request_rate``: requests per second, arriving at random (exponential gaps); None: ``concurrency`` clients, each of
    which asks again as soon as it has its answer.
    """

    num_requests: int
    request_rate: float | None
    concurrency: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    seed: int = 0

    def requests(self, vocab_size: int) -> list[PlannedRequest]:
        """In order of arrival. Without a rate all are due at once, and clients take them one by one."""
        rng = random.Random(self.seed)
        due_s, planned = 0.0, []
        for _ in range(self.num_requests):
            if self.request_rate is not None:
                due_s += rng.expovariate(self.request_rate)
            prompt = [rng.randrange(vocab_size) for _ in range(self.prompt_tokens.draw(rng))]
            planned.append(PlannedRequest(due_s, prompt, self.output_tokens.draw(rng)))
        return planned


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request before it is sent. ``due_s`` counts from the start of the run."""

    due_s: float
    prompt: list[int]
    output_tokens: int


@dataclass(slots=True, kw_only=True)
class RequestSample:
    """One request as its client saw it. Times in seconds from the start of the run."""

    prompt_tokens: int
    start_s: float  # when it was due, even if the engine was in the middle of a step; then its TTFT counts that wait
    token_times_s: list[float] = field(default_factory=list)  # of each token
    finish_reason: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.token_times_s[0] - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None with fewer than two."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latencies. Tokens that come out together, since they share a character, have no gap between."""
        arrivals = list(dict.fromkeys(self.token_times_s))
        return [later - earlier for earlier, later in itertools.pairwise(arrivals)]


def run_workload(engine: Engine, workload: Workload) -> list[RequestSample]:
    """Send the workload and step the engine until all answers are there. ConfigError if a request cannot fit.

    RequestFailed if the engine ends one early.
    """
    longest = workload.prompt_tokens.high + workload.output_tokens.high
    if longest > engine.config.max_model_len:
        raise ConfigError(
            f"a request may have {longest} tokens, prompt and output, but max_model_len is "
            f"{engine.config.max_model_len}; shorten --prompt-tokens or --output-tokens, or raise --max-model-len"
        )
    planned = workload.requests(engine.config.vocab_size)
    samples: dict[str, RequestSample] = {}
    running = sent = 0
    zero, zero_monotonic = time.perf_counter(), time.monotonic()
    while sent < len(planned) or running:
        now = time.perf_counter() - zero
        while sent < len(planned):
            if planned[sent].due_s > now if workload.request_rate is not None else running >= workload.concurrency:
                break
            start_s = now if workload.request_rate is None else planned[sent].due_s
            request_id = f"bench-latency-{sent}"
            _submit(engine, planned[sent], request_id, zero_monotonic + start_s)
            samples[request_id] = RequestSample(prompt_tokens=len(planned[sent].prompt), start_s=start_s)
            sent, running = sent + 1, running + 1
        if not running:
            time.sleep(max(0.0, planned[sent].due_s - now))
            continue
        outputs = engine.step()
        now = time.perf_counter() - zero
        for output in outputs:
            sample = samples[output.request_id]
            sample.token_times_s.extend(now for _ in output.token_ids)
            if output.finish_reason is not None:
                sample.finish_reason = output.finish_reason
                running -= 1
    for request_id, sample in samples.items():
        if sample.finish_reason != "length" or not sample.token_times_s:
            raise RequestFailed(f"request {request_id} ended with {sample.finish_reason!r}; the log above says why")
    return list(samples.values())


def _submit(engine: Engine, planned: PlannedRequest, request_id: str, arrival_s: float) -> None:
    sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=planned.output_tokens, ignore_eos=True)
    engine.submit(
        make_requests(
            engine.config,
            Submission(request_id=request_id, prompt_token_ids=planned.prompt, sampling=sampling),
            arrival_s=arrival_s,
        )
    )


def latencies(samples: Sequence[RequestSample]) -> dict[str, dict[str, float] | None]:
    """Distributions in seconds: TTFT and TPOT over requests, ITL over the gaps of all requests."""
    return {
        "ttft_s": distribution(sample.ttft_s for sample in samples),
        "tpot_s": distribution(tpot for sample in samples if (tpot := sample.tpot_s) is not None),
        "itl_s": distribution(gap for sample in samples for gap in sample.gaps_s),
    }
