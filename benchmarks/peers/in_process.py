"""Decoding and prefill without a server: ``llama-batched-bench`` beside ``octavo bench throughput``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cases import CaseResult, failed_case
from contenders import Contender, Files
from workloads import Figure

TIMEOUT_S = 900.0

Figures = dict[str, float]  # tokens per second by the figure's name
Bounds = dict[str, tuple[float, str]]  # share of the best that this machine could do, and what limits it


class BenchFailed(Exception):
    """A program ended badly or said nothing that can be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Streams that decode around ``context`` positions for ``steps`` steps, and prompts to process."""

    name: str = "no HTTP"
    context: int = 256
    steps: int = 32
    streams: tuple[int, ...] = (1, 8, 32)
    prefills: tuple[int, ...] = (512, 4096)

    @property
    def figures(self) -> tuple[Figure, ...]:
        """One per row of the table."""
        decodes = [
            Figure(name=f"decode_{n}", label=f"decode, {n} stream{'s' if n > 1 else ''}", unit="tok/s")
            for n in self.streams
        ]
        return *decodes, *(Figure(name=f"prefill_{n}", label=f"prefill of {n:,}", unit="tok/s") for n in self.prefills)

    @property
    def prompt(self) -> int:
        """Tokens before the first step, so that the steps lie around ``context``."""
        return self.context - self.steps // 2

    def quick(self) -> Bench:
        """The same form, as small as shows that everything runs."""
        return replace(self, context=64, steps=8, streams=self.streams[:2], prefills=(128,))


def run_bench(contender: Contender, bench: Bench, files: Files, root: Path, threads: int, round_: int) -> CaseResult:
    """Never raises for what a program does: that is in the result."""
    started = time.perf_counter()
    measure = _octavo if contender.peer == "octavo" else _llama_cpp
    try:
        figures, bounds = measure(contender, bench, files.path_for(contender), root, threads)
    except BenchFailed as error:
        return failed_case(contender, bench.name, round_, str(error), time.perf_counter() - started)
    return CaseResult(
        round=round_,
        contender=contender.name,
        workload=bench.name,
        wall_s=round(time.perf_counter() - started, 3),
        figures=figures,
        bounds=bounds,
        asked=len(bench.figures),
        failed=len(bench.figures) - len(figures),
    )


def _octavo(contender: Contender, bench: Bench, model: Path, root: Path, threads: int) -> tuple[Figures, Bounds]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        argv = [sys.executable, "-m", "octavo", "bench", "throughput", str(model), "--json", str(file)]
        argv += ["--threads", str(threads), "--repeats", "1", "--context", str(bench.context)]
        argv += ["--streams", _joined(bench.streams), "--prefill", _joined(bench.prefills)]
        _run([*argv, "--output-tokens", str(bench.steps)])
        cases = json.loads(file.read_text(encoding="utf-8"))["cases"]
    figures, bounds = Figures(), Bounds()
    for case in cases:
        name = f"{case['kind']}_{case['streams' if case['kind'] == 'decode' else 'context']}"
        figures[name] = case["tokens_per_s"]
        if case["share_of_bound"] is not None:
            bounds[name] = (case["share_of_bound"], case["limit"])
    return figures, bounds


def _llama_cpp(contender: Contender, bench: Bench, model: Path, root: Path, threads: int) -> tuple[Figures, Bounds]:
    program = str(root / "llama.cpp" / "build" / "bin" / "llama-batched-bench")
    common = [program, "--model", str(model), "--threads", str(threads), "--output-format", "jsonl"]
    room = -(-(bench.prompt + bench.steps) // 256) * 256
    decoding = [*common, "-npp", str(bench.prompt), "-ntg", str(bench.steps), "-npl", _joined(bench.streams)]
    # -pps: the prompt is run once and its KV copied for each stream; what is measured comes after
    decoding += ["--ctx-size", str(room * max(bench.streams)), "--no-kv-unified", "-pps"]
    prefilling = [*common, "-npp", _joined(bench.prefills), "-ntg", "1", "-npl", "1"]
    prefilling += ["--ctx-size", str(max(bench.prefills) + 256)]
    figures = {f"decode_{row['pl']}": row["speed_tg"] for row in parse_batched_bench(_run(decoding))}
    return figures | {f"prefill_{row['pp']}": row["speed_pp"] for row in parse_batched_bench(_run(prefilling))}, {}


def parse_batched_bench(text: str) -> list[dict[str, Any]]:
    """The rows of ``--output-format jsonl``, which stand among lines of the log. BenchFailed if there are none."""
    rows = []
    for line in text.splitlines():
        start = line.find("{")  # the log may put a prefix before it
        if start < 0 or '"speed_tg"' not in line:
            continue
        try:
            rows.append(json.loads(line[start:]))
        except ValueError as error:
            raise BenchFailed(f"llama-batched-bench wrote a row that is no JSON: {line[:200]}") from error
    if not rows:
        raise BenchFailed(f"llama-batched-bench wrote no rows: {text.strip()[-200:] or 'nothing'}")
    return rows


def _run(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except OSError as error:
        raise BenchFailed(f"{argv[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise BenchFailed(f"{Path(argv[0]).name} was not done after {TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise BenchFailed(f"{Path(argv[0]).name} ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout + done.stderr


def _joined(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))
