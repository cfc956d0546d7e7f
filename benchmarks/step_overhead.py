"""What a step costs beside its kernels: Python per step, and with 64 HTTP streams the engine's wait for the GIL.

    python benchmarks/step_overhead.py --steps 200

Offline, one thread steps the engine: its overhead is a step's wall time without the time inside the kernels. Over
HTTP, a server process streams to 64 clients in this process; after each C++ call the engine's thread must take the GIL
back from the event loop, and the C++ side measures for how long. The server's step records hold both figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from octavo.api.server import serve
from octavo.cli.bench_throughput import ThroughputBench
from octavo.cli.distributions import distribution
from octavo.cli.report import config_facts, host_facts, save
from octavo.core.config import EngineConfig, ServerConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.load import load_engine
from octavo.observability.snapshots import step_dict

CONTEXT, PROMPT = 256, 64
TIMEOUT_S = 600.0


def engine_config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        model=args.model,
        backend="native",
        threads=args.threads,
        max_num_seqs=args.streams,
        enable_prefix_caching=False,
        chunking="fixed",
        chunk_size=2048,
        trace_steps=1 << 16,
    )


def offline(args: argparse.Namespace) -> dict[str, Any]:
    """Steps of one stream and of many, on this thread, with nobody else awake."""
    engine = load_engine(engine_config(args))
    try:
        bench = ThroughputBench(engine)
        bench.warm_up()
        found: dict[str, Any] = {"config": config_facts(engine.config)}
        for streams in (1, args.streams):
            [repeat] = bench.decode(streams, CONTEXT, args.steps, 1).repeats
            found[f"{streams} streams"] = {
                "overhead_s": [step.overhead_s for step in repeat.steps],
                "build_s": [step.build_s for step in repeat.steps],
                "kernels_s": [step.forward_s + step.sample_s for step in repeat.steps],
            }
    finally:
        engine.close()
    return found


def serve_and_dump(args: argparse.Namespace) -> None:
    """The server process: serves until a signal, then writes its step records."""
    engine = AsyncEngine(engine_config(args))
    serve(engine, ServerConfig(port=0, log_level="error"), on_ready=lambda url: print(url, flush=True))
    steps = [step_dict(record) for record in engine.loaded.tracer.steps()]
    Path(args.dump_steps).write_text(json.dumps(steps), encoding="utf-8")


@contextlib.contextmanager
def server_process(dump: Path) -> Iterator[str]:
    """A server with this program's arguments; its URL. It has dumped its steps when the context ends."""
    command = [sys.executable, __file__, *sys.argv[1:], "--dump-steps", str(dump)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url:
                raise SystemExit(f"the server ended with {process.wait()} before it was ready")
            yield url
            process.send_signal(signal.SIGINT)
            process.wait(TIMEOUT_S)
        finally:
            process.kill()


async def stream(client: httpx.AsyncClient, url: str, model: str, prompt: list[int], max_tokens: int) -> int:
    """One streaming completion; the number of events it got."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"the server answered {answer.status_code}: {(await answer.aread()).decode()}")
        return sum([line.startswith("data: {") async for line in answer.aiter_lines()])


async def stream_all(args: argparse.Namespace, url: str) -> list[int]:
    rng = random.Random(args.seed)
    prompts = [[rng.randrange(3, 40_000) for _ in range(PROMPT)] for _ in range(args.streams)]
    limits = httpx.Limits(max_connections=args.streams)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
        model = (await client.get(f"{url}/v1/models")).json()["data"][0]["id"]
        return await asyncio.gather(*(stream(client, url, model, prompt, args.steps) for prompt in prompts))


def over_http(args: argparse.Namespace) -> dict[str, Any]:
    """Steps of a server while every stream decodes."""
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) / "steps.json"
        with server_process(dump) as url:
            events = asyncio.run(stream_all(args, url))
        steps = json.loads(dump.read_text(encoding="utf-8"))
    full = [
        (before, step)
        for before, step in itertools.pairwise(steps)
        if step["step_id"] == before["step_id"] + 1
        and len(step["chunks"]) == args.streams
        and all(chunk["reason"] == "decode" for chunk in step["chunks"])
    ]
    kernels = [(step["forward_ms"] + step["sample_ms"]) / 1e3 for _, step in full]
    between = [step["t_s"] - before["t_s"] for before, step in full]
    return {
        "events_per_stream": events,
        "gil_wait_s": [step["gil_wait_ms"] / 1e3 for _, step in full],
        "overhead_s": [whole - inside for whole, inside in zip(between, kernels, strict=True)],
        "build_s": [step["build_ms"] / 1e3 for _, step in full],
        "kernels_s": kernels,
    }


def report(results: dict[str, dict[str, Any]]) -> None:
    table = Table("ms per step", "steps", "P50", "P90", "P99", "max", box=None)

    def add(label: str, samples: Sequence[float]) -> None:
        found = distribution(samples)
        cells = ["-"] * 4 if found is None else [f"{found[k] * 1e3:.3f}" for k in ("p50", "p90", "p99", "max")]
        table.add_row(label, str(len(samples)), *cells)

    for name, samples in results.items():
        add(f"{name}: outside the kernels", samples["overhead_s"])
        add(f"{name}: of which building arrays and reading results", samples["build_s"])
        if "gil_wait_s" in samples:
            add(f"{name}: of which waiting for the GIL", samples["gil_wait_s"])
        add(f"{name}: kernels", samples["kernels_s"])
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "step-overhead.json"))
    parser.add_argument("--dump-steps", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dump_steps:
        serve_and_dump(args)
        return
    alone = offline(args)
    config = alone.pop("config")
    results = {**alone, f"{args.streams} HTTP streams": over_http(args)}
    report(results)
    arguments = {name: value for name, value in vars(args).items() if name != "dump_steps"}
    save(Path(args.output), {"host": host_facts(), "arguments": arguments, "config": config, "results": results})


if __name__ == "__main__":
    main()
