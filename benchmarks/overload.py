"""How an engine degrades: first tokens, gaps between tokens and throughput against the streams that arrive together.

Each load runs under two laws, in turns in one process, so that the machine's drift meets both alike. "stretched" is the
product's: a prefill that waits stretches the target by degrees, up to four times. "all at once" is what came before:
past max_prefill_wait_s, every step carries whatever fits in a second.

    OCTAVO_ISA=avx2 python benchmarks/overload.py --loads 2,4,8,16 --rounds 2      # two cores, 8 minutes
    python benchmarks/overload.py --clock cpu --loads 4,8,16,32 --rounds 2         # a machine that others use too

``--clock cpu`` computes on one thread and takes that thread's CPU time for the time: what others do on the machine then
hardly matters. No server and no event loop: the engine is stepped here.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from octavo.cli.report import config_facts, host_facts, save
from octavo.core.config import EngineConfig
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import Submission
from octavo.core.sampling_params import SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.load import load_engine
from octavo.engine.model_runner import ModelRunner
from octavo.engine.requests import make_requests
from octavo.scheduler.chunk_sizer import (
    MAX_STEP_S,
    MAX_STRETCH,
    UNLIMITED,
    AdaptiveChunkSizer,
    StepBudget,
    StepSituation,
    TimeBounds,
    _TargetBudget,
)
from octavo.scheduler.cost_model import StepLoad


class Stretched(AdaptiveChunkSizer):
    """The product's law. Notes what it aims at while no prefill waits for too long."""

    def __init__(self, block_size: int, target_itl_s: float | None) -> None:
        super().__init__(block_size, target_itl_s)
        self.steps: list[tuple[float, float]] = []  # (duration, usual target) in s, where prefill met decodes
        self._usual_s: float | None = None

    def target_s(self, decodes: StepLoad) -> float:
        self._usual_s = super().target_s(decodes)
        return self._usual_s

    def observe(self, load: StepLoad, prefill_tokens: int, duration_s: float) -> None:
        super().observe(load, prefill_tokens, duration_s)
        if self._usual_s is not None and prefill_tokens:
            self.steps.append((duration_s, self._usual_s))
        self._usual_s = None


class AllAtOnce(Stretched):
    """The law before: whoever has waited for max_prefill_wait_s gets the whole budget, up to a second."""

    def begin(self, situation: StepSituation) -> StepBudget:
        if situation.wait <= 1.0 or situation.decodes.tokens == 0:
            return super().begin(situation)
        self.target_s(situation.decodes)  # noted, not minded
        tokens = min(situation.hard_limit, situation.spare_blocks * self._block_size)
        floor = min(self._block_size, situation.hard_limit)
        bounds = TimeBounds(target_s=MAX_STEP_S, limit_s=MAX_STEP_S, reason="max_step", most_pairs=UNLIMITED)
        return _TargetBudget(tokens, "max_prefill_wait_s", floor, situation, self, bounds)


LAWS: dict[str, type[Stretched]] = {"all at once": AllAtOnce, "stretched": Stretched}


class ClockedRunner:
    """Runs plans and says how long they took on the benchmark's clock."""

    def __init__(self, runner: ModelRunner, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._clock = clock

    def execute(self, plan: StepPlan) -> StepResult:
        started = self._clock()
        result = self._runner.execute(plan)
        return dataclasses.replace(result, build_s=0.0, forward_s=self._clock() - started, sample_s=0.0)


def one_burst(engine: Engine, sizer: Stretched, prompts: list[list[int]], answer: int) -> dict[str, Any]:
    """All ``prompts`` at once under ``sizer`` -> times in ms from their arrival."""
    clock = engine.clock
    engine.scheduler._sizer = sizer
    sizer.steps.clear()
    sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    start = clock()
    times: dict[str, list[float]] = {}
    for index, prompt in enumerate(prompts):
        requests = make_requests(
            engine.config,
            Submission(request_id=f"{start}-{index}", prompt_token_ids=prompt, sampling=sampling),
            arrival_s=start,
        )
        engine.submit(requests)
        times[requests[0].request_id] = []
    while engine.has_unfinished:
        outputs = engine.step()
        now = clock() - start
        for output in outputs:
            times[output.request_id] += [now] * len(output.token_ids)
    return {
        "wall_ms": milliseconds([max(token_times[-1] for token_times in times.values())])[0],
        "ttft_ms": milliseconds([token_times[0] for token_times in times.values()]),
        "itl_ms": milliseconds([later - earlier for ts in times.values() for earlier, later in itertools.pairwise(ts)]),
        "steps_ms": [milliseconds(list(step)) for step in sizer.steps],
    }


def milliseconds(seconds: list[float]) -> list[float]:
    return [round(1e3 * s, 1) for s in seconds]


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Every burst, in the order in which they ran."""
    config = EngineConfig(
        model=args.model,
        backend=args.backend,
        threads=1 if args.clock == "cpu" else args.threads,
        max_num_seqs=max(16, *args.loads),
        max_model_len=args.prompt + args.answer,
        max_prefill_wait_s=args.max_prefill_wait_s,
        enable_prefix_caching=False,  # both laws get the same prompts
    )
    target_s = None if args.target_itl_ms is None else args.target_itl_ms / 1e3
    sizers = {name: law(config.block_size, target_s) for name, law in LAWS.items()}
    engine = load_engine(config)
    clock = time.thread_time if args.clock == "cpu" else time.monotonic
    engine.clock = clock
    engine.runner = ClockedRunner(engine.runner, clock)  # type: ignore[assignment]  # what a step needs of it
    rng = random.Random(args.seed)

    def prompts(count: int) -> list[list[int]]:
        return [[rng.randrange(3, 40_000) for _ in range(args.prompt)] for _ in range(count)]

    bursts = []
    try:
        for sizer in sizers.values():
            one_burst(engine, sizer, prompts(2), 32)  # warm-up: costs are learned
        for turn in range(args.rounds):
            for load in args.loads:
                burst = prompts(load)
                for name in list(LAWS) if turn % 2 == 0 else reversed(LAWS):  # neither is always the first
                    facts = one_burst(engine, sizers[name], burst, args.answer)
                    bursts.append({"law": name, "streams": load, "round": turn, **facts})
        return config_facts(engine.config), bursts
    finally:
        engine.close()


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def summarise(bursts: list[dict[str, Any]], answer: int) -> list[dict[str, Any]]:
    """One row per load and law: medians over the rounds of each burst's figure."""
    rows = []
    for load in sorted({burst["streams"] for burst in bursts}):
        for name in LAWS:
            mine = [burst for burst in bursts if (burst["law"], burst["streams"]) == (name, load)]
            shares = [[step / (MAX_STRETCH * usual) for step, usual in b["steps_ms"]] for b in mine]
            row = {
                "streams": load,
                "law": name,
                "ttft_p50_s": statistics.median(percentile(b["ttft_ms"], 0.5) for b in mine) / 1e3,
                "ttft_p99_s": statistics.median(percentile(b["ttft_ms"], 0.99) for b in mine) / 1e3,
                "itl_p50_ms": statistics.median(percentile(b["itl_ms"], 0.5) for b in mine),
                "itl_p99_ms": statistics.median(percentile(b["itl_ms"], 0.99) for b in mine),
                "p99_step_by_4_targets": statistics.median(percentile(s, 0.99) for s in shares if s),
                "output_tokens_per_s": statistics.median(load * answer / b["wall_ms"] * 1e3 for b in mine),
            }
            rows.append(row)
        # of the same round, so that drift cancels
        pairs: dict[int, dict[str, float]] = {}
        for burst in bursts:
            if burst["streams"] == load:
                pairs.setdefault(burst["round"], {})[burst["law"]] = burst["wall_ms"]
        rows[-1]["throughput_ratio"] = statistics.median(p["all at once"] / p["stretched"] for p in pairs.values())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default="1,2,4,8,16", help="streams that arrive together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--target-itl-ms", type=float, default=None)
    parser.add_argument("--max-prefill-wait-s", type=float, default=5.0)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--output", default="benchmarks/results/overload.json")
    args = parser.parse_args()
    args.loads = [int(load) for load in args.loads.split(",")]
    config, bursts = run(args)
    rows = summarise(bursts, args.answer)
    facts = {"host": host_facts(), "isa": os.environ.get("OCTAVO_ISA"), "config": config, "arguments": vars(args)}
    save(Path(args.output), {**facts, "summary": rows, "bursts": bursts})
    columns = (
        "streams",
        "law",
        "TTFT P50 s",
        "P99 s",
        "ITL P50 ms",
        "P99 ms",
        "P99 step / 4 targets",
        "tok/s",
        "ratio",
    )
    table = Table(*columns, box=None)
    for row in rows:
        ratio = row.get("throughput_ratio")
        table.add_row(
            str(row["streams"]), row["law"], f"{row['ttft_p50_s']:.2f}", f"{row['ttft_p99_s']:.2f}",
            f"{row['itl_p50_ms']:.0f}", f"{row['itl_p99_ms']:.0f}", f"{row['p99_step_by_4_targets']:.2f}",
            f"{row['output_tokens_per_s']:.0f}", "" if ratio is None else f"{ratio:.2f}",
        )  # fmt: skip
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
