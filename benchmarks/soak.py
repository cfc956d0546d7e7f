"""Soak: random lengths, aborts, forks and priorities on a KV pool a quarter of what the load needs.

Every sequence must end in exactly one terminal state, the bookkeeping must be clean and memory flat:

    python benchmarks/soak.py --minutes 10
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import random
import sys
import time
from collections import Counter
from pathlib import Path

from octavo.cli.report import host_facts, save
from octavo.core.config import EngineConfig
from octavo.core.request import Submission
from octavo.core.sampling_params import SamplingParams
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.engine import Engine

MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE = 16, 512, 16
TERMINAL = {"FINISHED", "ABORTED", "FAILED"}


@dataclasses.dataclass(slots=True)
class Tally:
    """What the clients saw."""

    ends: Counter[str] = dataclasses.field(default_factory=Counter)  # finish_reason -> sequences
    ends_of: Counter[str] = dataclasses.field(default_factory=Counter)  # sequence -> times it ended
    left_early: int = 0  # sequences that a client walked away from
    submitted: int = 0
    tokens: int = 0


async def client(engine: AsyncEngine, rng: random.Random, name: str, deadline: float, tally: Tally) -> None:
    """Send one request after another until the deadline; walk away from one in five."""
    systems = [[rng.randrange(3, 40000) for _ in range(length)] for length in (40, 97, 160)]
    count = 0
    while time.monotonic() < deadline:
        count += 1
        prompt = rng.choice(systems)[: rng.randint(1, 160)] + [
            rng.randrange(3, 40000) for _ in range(rng.randint(1, 120))
        ]
        n = rng.choice((1, 1, 1, 2, 3))
        sampling = SamplingParams(
            temperature=rng.choice((0.0, 0.8)),
            max_tokens=rng.randint(1, 150),
            ignore_eos=rng.random() < 0.5,
            repetition_penalty=rng.choice((1.0, 1.1)),
            stop=rng.choice(((), ("the",))),
        )
        stream = engine.submit(
            Submission(
                request_id=f"{name}-{count}",
                prompt_token_ids=prompt,
                sampling=sampling,
                n=n,
                priority=rng.randint(0, 3),
                client=name,
            )
        )
        tally.submitted += n
        leave_after = rng.randint(0, 30) if rng.random() < 0.2 else None
        seen = ended = 0
        async with contextlib.aclosing(stream):
            async for outputs in stream:
                for output in outputs:
                    seen += len(output.token_ids)
                    if output.finish_reason is not None:
                        ended += 1
                        tally.ends[output.finish_reason] += 1
                        tally.ends_of[output.request_id] += 1
                if leave_after is not None and seen >= leave_after:
                    break
        tally.left_early += n - ended
        tally.tokens += seen
        await asyncio.sleep(rng.random() * 0.05)


def rss_bytes() -> int:
    """Resident memory of this process (Linux)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def audit(engine: Engine) -> dict[str, object]:
    """Terminal states and bookkeeping, on the engine thread."""
    manager = engine.scheduler.manager
    manager.check_integrity()
    traces = list(engine.tracer.requests())
    terminal = Counter(sum(event.event in TERMINAL for event in trace.events()) for trace in traces)
    cache = manager.stats()
    return {
        "kept_traces": len(traces),
        "traces_by_terminal_events": dict(terminal),
        "ended": dict(engine.tracer.metrics.requests_ended),
        "preemptions": engine.tracer.metrics.preemptions,
        "steps": engine.tracer.metrics.steps,
        "blocks_in_use": cache.num_blocks - cache.free_blocks - cache.cached_blocks,
        "evictions": cache.evictions,
    }


async def soak(minutes: float, seed: int, model: str) -> dict[str, object]:
    probe = AsyncEngine(EngineConfig(model=model, max_num_seqs=1, max_model_len=64))
    await probe.start()
    bytes_per_token = probe.config.kv_cache_bytes // (probe.config.num_blocks * BLOCK_SIZE)
    await probe.stop()
    pool = MAX_NUM_SEQS * MAX_MODEL_LEN // 4 * bytes_per_token
    engine = AsyncEngine(
        EngineConfig(
            model=model,
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            kv_cache_memory=pool,
            policy="priority",
        )
    )
    await engine.start()
    tally = Tally()
    deadline = time.monotonic() + minutes * 60
    clients = [
        asyncio.create_task(client(engine, random.Random(seed * 1000 + index), f"client{index}", deadline, tally))
        for index in range(24)
    ]
    memory = []
    while time.monotonic() < deadline:
        await asyncio.sleep(min(10.0, max(0.1, deadline - time.monotonic())))
        memory.append(rss_bytes())
    await asyncio.gather(*clients)
    await engine.drain(120)
    facts = await engine.inspect(audit)
    await engine.stop()
    return {
        "submitted": tally.submitted,
        "ends_seen": dict(tally.ends),
        "left_early": tally.left_early,
        "tokens": tally.tokens,
        "ended_more_than_once": [name for name, times in tally.ends_of.items() if times > 1],
        "rss_bytes": memory,
        **facts,
    }


def verdict(result: dict[str, object]) -> list[str]:
    """What is wrong; nothing if the soak passed."""
    wrong = []
    if result["ended_more_than_once"]:
        wrong.append(f"ended more than once: {result['ended_more_than_once']}")
    if set(result["traces_by_terminal_events"]) - {1}:  # type: ignore[call-overload]
        wrong.append(f"traces by number of terminal events: {result['traces_by_terminal_events']}")
    ended = sum(result["ended"].values())  # type: ignore[attr-defined]
    if ended != result["submitted"]:
        wrong.append(f"{result['submitted']} were submitted but {ended} ended")
    if result["blocks_in_use"]:
        wrong.append(f"{result['blocks_in_use']} blocks are still in use")
    memory: list[int] = result["rss_bytes"]  # type: ignore[assignment]
    third = len(memory) // 3
    if third:
        early, late = max(memory[third : 2 * third]), max(memory[2 * third :])
        if late > early * 1.02 + (8 << 20):
            wrong.append(f"memory grew from {early} to {late} bytes over the last third")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--output", default="benchmarks/results/soak.json")
    args = parser.parse_args()
    result = asyncio.run(soak(args.minutes, args.seed, args.model))
    wrong = verdict(result)
    save(Path(args.output), {"host": host_facts(), "minutes": args.minutes, "result": result, "wrong": wrong})
    for name, value in result.items():
        if name != "rss_bytes":
            print(f"{name}: {value}")
    print("PASS" if not wrong else "FAIL: " + "; ".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
