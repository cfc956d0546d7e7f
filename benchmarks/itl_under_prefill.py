"""Inter-token latency of streaming chats while somebody else's long prompt is processed.

Four chats stream; a 4,000-token prompt arrives among them. Adaptive chunk sizing against a fixed budget, in turns in
one process, so that the machine's drift meets both alike:

    python benchmarks/itl_under_prefill.py --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from octavo.cli.report import host_facts, save
from octavo.core.config import EngineConfig
from octavo.core.request import Submission
from octavo.core.sampling_params import SamplingParams
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.engine import Engine

NUM_CHATS, CHAT_PROMPT = 4, 64


async def stream_times(engine: AsyncEngine, prompt: list[int], max_tokens: int, name: str) -> list[float]:
    """Arrival time of each token of one request."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    times: list[float] = []
    async for outputs in engine.submit(Submission(request_id=name, prompt_token_ids=prompt, sampling=sampling)):
        now = time.monotonic()
        times.extend(now for output in outputs for _ in output.token_ids)
    return times


async def one_round(config: EngineConfig, long_prompt: int, seed: int) -> dict[str, Any]:
    """Gaps between the chats' tokens from the long prompt's arrival to its first token."""
    engine = AsyncEngine(config)
    await engine.start()
    try:
        rng = random.Random(seed)

        def prompt(length: int) -> list[int]:
            return [rng.randrange(3, 40_000) for _ in range(length)]

        await stream_times(engine, prompt(CHAT_PROMPT), 16, "warm-up")
        stop = asyncio.Event()
        answers: list[list[float]] = []  # token times, per answer

        async def chat(index: int) -> None:
            for turn in itertools.count():
                if stop.is_set():
                    return
                answers.append(await stream_times(engine, prompt(CHAT_PROMPT), 256, f"chat{index}-{turn}"))

        tasks = [asyncio.create_task(chat(index)) for index in range(NUM_CHATS)]
        await asyncio.sleep(3.0)
        arrival = time.monotonic()
        first_token = (await stream_times(engine, prompt(long_prompt), 1, "long"))[0]
        targets_s = await engine.inspect(lambda e: targets(e, arrival))
        stop.set()
        await asyncio.gather(*tasks)
    finally:
        await engine.stop()
    gaps = [
        later - earlier
        for times in answers
        for earlier, later in itertools.pairwise(times)
        if arrival <= later and earlier <= first_token
    ]
    return {"gaps_s": gaps, "ttft_of_long_prompt_s": first_token - arrival, "targets_s": targets_s}


def targets(engine: Engine, since_s: float) -> list[float]:
    """What each step since then aimed at that carried both prefill and decodes."""
    return [
        step.budget.target_s
        for step in engine.tracer.steps()
        if step.t_s >= since_s and step.budget is not None and step.budget.target_s is not None
        if any(chunk.reason == "decode" for chunk in step.chunks)
    ]


def p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


async def run(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    base = {"model": args.model, "max_num_seqs": 16, "backend": args.backend}
    configs = {
        "adaptive": EngineConfig(**base, chunking="adaptive", target_itl_ms=args.target_itl_ms),
        "fixed:512": EngineConfig(**base, chunking="fixed", chunk_size=512),
    }
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in configs}
    for index in range(args.rounds):
        for name, config in configs.items():
            results[name].append(await one_round(config, args.long_prompt, index))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long-prompt", type=int, default=4000)
    parser.add_argument("--target-itl-ms", type=float, default=None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--output", default="benchmarks/results/itl-under-prefill.json")
    args = parser.parse_args()
    results = asyncio.run(run(args))
    save(Path(args.output), {"host": host_facts(), "arguments": vars(args), "results": results})
    table = Table("chunking", "P50 ITL ms", "P99 ITL ms", "max ms", "target ms", "TTFT of long prompt s", box=None)
    for name, rounds in results.items():
        gaps = [gap for one in rounds for gap in one["gaps_s"]]
        wanted = [target for one in rounds for target in one["targets_s"]]
        table.add_row(
            name,
            f"{statistics.median(gaps) * 1e3:.0f}",
            f"{p99(gaps) * 1e3:.0f}",
            f"{max(gaps) * 1e3:.0f}",
            f"{statistics.median(wanted) * 1e3:.0f}" if wanted else "-",
            f"{statistics.median(one['ttft_of_long_prompt_s'] for one in rounds):.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
