"""One measurement: a contender, a workload, and what came out of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contenders import Contender
from fleet import Running, StartFailed
from workloads import Workload

from octavo.cli.load.measures import answered, latencies
from octavo.cli.load.record import read_record
from octavo.cli.load.sample import Sample

#: A request that takes longer has failed: a client would have given up.
REQUEST_TIMEOUT_S = 300.0
_LONG = "long"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """What a round knows of a contender and a workload. ``figures`` holds what was answered well enough to count."""

    round: int
    contender: str
    workload: str
    wall_s: float  # with everything around it: what the budget pays
    figures: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, tuple[float, str]] = field(default_factory=dict)  # figure -> share of octavo's own bound, limit
    asked: int = 0
    failed: int = 0
    messages: dict[str, int] = field(default_factory=dict)  # of failures, and how often
    notes: tuple[str, ...] = ()  # what the client had to leave out for this server
    requests: list[dict[str, Any]] = field(default_factory=list)


def run_workload(running: Running, workload: Workload, round_: int, seed: int) -> CaseResult:
    """Ask an awake server. Never raises for what the server does: that is in the result."""
    started = time.perf_counter()
    measure = _over_http if running.contender.has_http else _through_pipes
    notes: tuple[str, ...] = ()
    try:
        samples, duration_s, notes = measure(running, workload, seed)
    except StartFailed as error:
        return failed_case(running.contender, workload.name, round_, str(error), time.perf_counter() - started)
    messages = Counter(f"{s.failure}: {s.message}" if s.message else str(s.failure) for s in samples if s.failure)
    return CaseResult(
        round=round_,
        contender=running.contender.name,
        workload=workload.name,
        wall_s=round(time.perf_counter() - started, 3),
        figures=figures_of(samples, duration_s),
        asked=len(samples),
        failed=sum(messages.values()),
        messages=dict(messages),
        notes=notes,
        requests=[_stored(sample, gaps=_keeps_gaps(workload)) for sample in samples],
    )


def failed_case(contender: Contender, workload: str, round_: int, message: str, wall_s: float) -> CaseResult:
    """Nothing was measured at all."""
    return CaseResult(
        round=round_,
        contender=contender.name,
        workload=workload,
        wall_s=round(wall_s, 3),
        asked=1,
        failed=1,
        messages={message: 1},
    )


def figures_of(samples: Sequence[Sample], duration_s: float) -> dict[str, float]:
    """Figures of answered requests by name; those that have no meaning here are left out.

    output_tokens_per_s: of the clients, long prompts apart, over the whole run
    prompt_tokens_per_s: prompt tokens over time to first token, summed over requests
    """
    clients = [sample for sample in samples if sample.group != _LONG]
    good, good_long = answered(clients), [sample for sample in answered(samples) if sample.group == _LONG]
    if not good or duration_s <= 0:
        return {}
    found = latencies(clients)
    waited_s = sum(sample.ttft_s or 0.0 for sample in good)
    prompts = sum(sample.prompt_tokens or sample.asked_prompt_tokens or 0 for sample in good)
    figures: dict[str, float | None] = {
        "output_tokens_per_s": sum(sample.output_tokens for sample in good) / duration_s,
        "prompt_tokens_per_s": prompts / waited_s if waited_s > 0 else None,
        "ttft_mean_s": found["ttft_s"]["mean"] if found["ttft_s"] else None,
        "itl_p50_s": found["itl_s"]["p50"] if found["itl_s"] else None,
        "itl_p99_s": found["itl_s"]["p99"] if found["itl_s"] else None,
    }
    if good_long:
        figures["long_ttft_mean_s"] = sum(sample.ttft_s or 0.0 for sample in good_long) / len(good_long)
    return {name: value for name, value in figures.items() if value is not None and value > 0}


def bench_arguments(running: Running, workload: Workload, seed: int, json_file: Path) -> list[str]:
    """The load client's command line."""
    command = running.command
    arguments = ["--url", running.url, "--prompt-tokens", str(workload.prompt_tokens), "--seed", str(seed)]
    arguments += ["--output-tokens", str(workload.output_tokens), "--concurrency", str(workload.concurrency)]
    arguments += ["--timeout", str(REQUEST_TIMEOUT_S), "--json", str(json_file)]
    if command.model is not None:
        arguments += ["--model", command.model]
    if command.extra_body:
        arguments += ["--extra-body", json.dumps(dict(command.extra_body))]
    if workload.shared_prefix:
        arguments += ["--shared-prefix", str(workload.shared_prefix)]
    if workload.long_prompts:
        arguments += ["--long-prompt", str(workload.long_tokens), "--num-long", str(workload.long_prompts)]
        return [*arguments, "--long-every", str(workload.long_every_s)]
    return [*arguments, "--num-requests", str(workload.requests)]


def _over_http(running: Running, workload: Workload, seed: int) -> tuple[list[Sample], float, tuple[str, ...]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        argv = [sys.executable, "-m", "octavo", "bench", "serve", *bench_arguments(running, workload, seed, file)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if not file.exists():  # a server that cannot be measured at all
            said = (done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}").splitlines()
            raise StartFailed(said[-1])
        record = read_record(file)
    return record.samples, record.duration_s, tuple(record.facts["server"]["notes"])


def _through_pipes(running: Running, workload: Workload, seed: int) -> tuple[list[Sample], float, tuple[str, ...]]:
    job = {**dataclasses.asdict(workload), "seed": seed}
    answer = running.ask({key: value for key, value in job.items() if key != "figures"})
    samples = []
    for index, request in enumerate(answer["requests"]):
        sample = Sample(
            index=index,
            group=request["group"],
            asked_prompt_tokens=request["prompt_tokens"],
            asked_output_tokens=request["asked_output_tokens"],
            arrival_s=request["arrival_s"],
            prompt_tokens=request["prompt_tokens"],
            completion_tokens=request["output_tokens"],
            event_times_s=request["event_times_s"],
            event_tokens=[1] * len(request["event_times_s"]),
            end_s=request.get("end_s"),
        )
        if request["failure"]:
            sample.fail("short", request["failure"])
        samples.append(sample)
    return samples, answer["duration_s"], ("in process: no HTTP, no tokenizer",)


def _keeps_gaps(workload: Workload) -> bool:
    return any(figure.name.startswith("itl") for figure in workload.figures)


def _stored(sample: Sample, *, gaps: bool) -> dict[str, Any]:
    """A request as the result keeps it: seconds, and the gaps between its tokens in milliseconds where they count."""
    stored: dict[str, Any] = {"group": sample.group} if sample.group else {}
    for name in ("arrival_s", "ttft_s", "e2e_s", "tpot_s"):
        with contextlib.suppress(TypeError):
            stored[name] = round(getattr(sample, name), 4)
    stored |= {"prompt_tokens": sample.prompt_tokens, "output_tokens": sample.output_tokens}
    if sample.cached_tokens:
        stored["cached_tokens"] = sample.cached_tokens
    if sample.failure:
        stored["failure"] = sample.failure
    if gaps:
        stored["itl_ms"] = [round(gap * 1e3, 1) for gap in sample.itl_s]
    return stored
