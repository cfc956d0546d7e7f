"""Queue policies under load: who gets how much, and how long the unluckiest waits.

Two clients share four running sequences; "loud" keeps 40 requests in the engine, "quiet" 4. Under fcfs the loud one
takes nearly everything; under fair both get the same. Under priority, background requests (priority 5) compete with a
steady flood of urgent ones (priority 0) and still may not wait longer than aging allows:

    python benchmarks/policies.py --seconds 60
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from octavo.cli.report import host_facts, save
from octavo.core.config import EngineConfig, Policy
from octavo.core.request import Submission
from octavo.core.sampling_params import SamplingParams
from octavo.engine.async_engine import AsyncEngine

#: client -> (requests kept in the engine, priority of each)
CLIENTS: dict[Policy, dict[str, tuple[int, int]]] = {
    "fcfs": {"loud": (40, 0), "quiet": (4, 0)},
    "fair": {"loud": (40, 0), "quiet": (4, 0)},
    "priority": {"urgent": (12, 0), "background": (4, 5)},
}
MAX_NUM_SEQS, AGING_S = 4, 2.0


async def one_policy(policy: Policy, seconds: float, model: str) -> dict[str, Any]:
    """Tokens per client, and every wait from submission to first token, in seconds."""
    engine = AsyncEngine(
        EngineConfig(model=model, policy=policy, max_num_seqs=MAX_NUM_SEQS, max_model_len=256, aging_s=AGING_S)
    )
    await engine.start()
    tokens: dict[str, int] = defaultdict(int)
    waits: dict[str, list[float]] = defaultdict(list)
    deadline = time.monotonic() + seconds

    async def worker(client: str, index: int, priority: int) -> None:
        rng = random.Random(f"{client}{index}")
        for turn in range(1_000_000):
            if time.monotonic() >= deadline:
                return
            prompt = [rng.randrange(3, 40_000) for _ in range(32)]
            sampling = SamplingParams(max_tokens=32, ignore_eos=True, seed=turn)
            submitted = time.monotonic()
            name = f"{client}-{index}-{turn}"
            stream = engine.submit(
                Submission(
                    request_id=name, prompt_token_ids=prompt, sampling=sampling, client=client, priority=priority
                )
            )
            first = True
            async for outputs in stream:
                if first:
                    waits[client].append(time.monotonic() - submitted)
                    first = False
                if time.monotonic() < deadline:
                    tokens[client] += sum(len(output.token_ids) for output in outputs)

    jobs = [
        asyncio.create_task(worker(client, index, priority))
        for client, (count, priority) in CLIENTS[policy].items()
        for index in range(count)
    ]
    await asyncio.gather(*jobs)
    await engine.stop()
    return {"tokens": dict(tokens), "waits_s": dict(waits)}


async def run(seconds: float, model: str) -> dict[str, dict[str, Any]]:
    return {policy: await one_policy(policy, seconds, model) for policy in CLIENTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="per policy")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--output", default="benchmarks/results/policies.json")
    args = parser.parse_args()
    results = asyncio.run(run(args.seconds, args.model))
    save(Path(args.output), {"host": host_facts(), "arguments": vars(args), "results": results})
    table = Table("policy", "client", "requests kept", "tokens", "share %", "mean wait s", "longest wait s", box=None)
    for policy, result in results.items():
        total = sum(result["tokens"].values())
        for client, (count, _) in CLIENTS[policy].items():  # type: ignore[index]
            waits = result["waits_s"][client]
            served = result["tokens"].get(client, 0)
            table.add_row(
                policy, client, str(count), str(served), f"{100 * served / total:.0f}",
                f"{sum(waits) / len(waits):.2f}", f"{max(waits):.2f}",
            )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
