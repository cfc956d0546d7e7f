"""Inter-token latency of well-behaved streams while hostile clients do their worst, against the same streams alone.

A server of its own process, as a user starts it; 32 seeded streams; each attack begins once all of them have begun and
is cut short when they end. What they are told must not change (tests/attack asserts that); when they are told it may:

    python benchmarks/attacked_streams.py --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import time
from pathlib import Path
from typing import Any

from attacks import ATTACKS, Answer, Attack, Attacker, answered, well_behaved
from served_process import memory_bytes, served

from octavo.cli.report import host_facts, save
from octavo.cli.tables import Table, show

ALONE = "(alone)"


async def one_round(port: int, attack: Attack | None, size: int, num_streams: int, max_tokens: int) -> dict[str, Any]:
    """Gaps between the pieces of each stream after the attack's begin, and /health's answers meanwhile."""
    started = [asyncio.Event() for _ in range(num_streams)]
    streams = [asyncio.create_task(well_behaved(port, index, max_tokens, event)) for index, event in enumerate(started)]
    await asyncio.gather(*(event.wait() for event in started))
    began_s = time.monotonic()
    attacker, health_s = Attacker(port, size), []
    attacking = None if attack is None else asyncio.ensure_future(attack(attacker))
    try:
        while not all(stream.done() for stream in streams):
            asked_s = time.monotonic()
            await answered(port)
            health_s.append(time.monotonic() - asked_s)
            await asyncio.sleep(0.2)
        answers = await asyncio.gather(*streams)
    finally:
        if attacking is not None:
            attacking.cancel()
            await asyncio.wait([attacking])
        attacker.close()
    return {
        "gaps_s": [gap for answer in answers for gap in gaps_after(answer, began_s)],
        "health_s": health_s,
        "told": [answer.text for answer in answers],
        "size": size,
    }


def gaps_after(answer: Answer, began_s: float) -> list[float]:
    times = [answer.sent_s + t for t in answer.token_times_s]
    return [later - earlier for earlier, later in itertools.pairwise(times) if later >= began_s]


async def run(port: int, args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    chosen = [attack for attack in ATTACKS if not args.attack or attack.__name__ in args.attack]
    results: dict[str, list[dict[str, Any]]] = {}
    for _ in range(args.rounds):
        for attack in (None, *chosen):
            name = ALONE if attack is None else attack.__name__
            size = 0 if attack is None else ATTACKS[attack][1]
            result = await one_round(port, attack, size, args.streams, args.max_tokens)
            results.setdefault(name, []).append(result)
            await asyncio.sleep(3.0)  # what is left of the attack ends
    return results


def p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--attack", action="append", help="only these; may be given more than once")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--output", default="benchmarks/results/attacked-streams.json")
    args = parser.parse_args()
    with served([args.model, "--max-model-len", "2048"], os.environ) as server:
        results = asyncio.run(run(server.port, args))
        memory = memory_bytes(server.pid)
    expected = results[ALONE][0]["told"]
    headings = ("size", "P50", "P99", "max", "/health", "same text")
    title = "ms between pieces (P50, P99, max), and of /health (P99)"
    rows = []
    for name, rounds in results.items():
        gaps = [gap for result in rounds for gap in result["gaps_s"]]
        health = [s for result in rounds for s in result["health_s"]]
        same = all(result.pop("told") == expected for result in rounds)
        figures = (statistics.median(gaps), p99(gaps), max(gaps), p99(health))
        rows.append([name, str(rounds[0]["size"]), *(f"{s * 1e3:.0f}" for s in figures), "yes" if same else "NO"])
    show(Table(headings=("attack", *headings), title=title, rows=rows))
    save(Path(args.output), {"host": host_facts(), "server_memory_bytes": memory, "results": results})


if __name__ == "__main__":
    main()
