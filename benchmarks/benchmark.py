"""The founding benchmark: Hugging Face ``generate``, one prompt after another, against octavo, all prompts at once.

    python benchmarks/benchmark.py --num-requests 5 --max-tokens 64

Both run in this process on the same weights, dtype, threads and prompts, greedily, to exactly ``--max-tokens`` tokens.
All requests arrive together at time zero, so a TTFT counts the wait for one's turn; "TTFT of one's own turn" leaves it
out. Rounds alternate between the two, and the table shows medians over the rounds. octavo's prefix cache is cold at the
start of each round; within a round, prompts that start alike share what they share.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from octavo.cli.report import host_facts, save
from octavo.core.config import EngineConfig
from octavo.core.sampling_params import SamplingParams
from octavo.engine.load import LoadedEngine, load_engine
from octavo.engine.requests import make_requests

QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences how rain forms.",
    "Write a short poem about a lighthouse in winter.",
    "How do I reverse a list in Python? Show an example and explain each line of it.",
    "List three differences between a virus and a bacterium, and name one disease caused by each of them.",
    "Give me a recipe for pancakes for four people.",
    "Why is the sky blue?",
    "Summarise the plot of Romeo and Juliet for a child of eight, without frightening it.",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request. Times in seconds."""

    prompt_tokens: int
    token_ids: list[int]
    start_s: float  # from time zero to its own turn
    first_s: float  # from time zero to its first token
    last_s: float  # from time zero to its last token

    @property
    def tpot_s(self) -> float | None:
        count = len(self.token_ids)
        return (self.last_s - self.first_s) / (count - 1) if count > 1 else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """All requests, once, on one engine."""

    wall_s: float
    samples: list[Sample]


def main() -> None:
    args = _parse_arguments()
    engine = load_engine(EngineConfig(model=args.model, backend=args.backend, device="cpu", dtype=args.dtype))
    prompts = chat_prompts(engine, args.num_requests)
    import torch  # after load_engine, which has set the number of threads
    from hf_model import load_llama

    torch.set_num_threads(engine.config.threads)
    peer = load_llama(Path(engine.config.model_path), getattr(torch, engine.config.dtype))
    salts = (str(number).encode() for number in itertools.count())
    runs: dict[str, Callable[[Sequence[list[int]], int], Round]] = {
        "huggingface": lambda given, n: run_huggingface(peer, given, n),
        "octavo": lambda given, n: run_octavo(engine, given, n, cache_salt=next(salts)),
    }
    rounds: dict[str, list[Round]] = {name: [] for name in runs}
    for number in range(-1, args.rounds):  # the first warms up and is not counted
        for name, run in runs.items():
            done = run(prompts, args.max_tokens) if number >= 0 else run(prompts[:1], 4)
            if number >= 0:
                rounds[name].append(done)
                print(f"round {number + 1} of {args.rounds}: {name} {done.wall_s:.2f} s", file=sys.stderr)
    engine.close()
    _report(args, engine, rounds)


def chat_prompts(engine: LoadedEngine, count: int) -> list[list[int]]:
    """Token ids of ``count`` different chats of different lengths."""
    if engine.chat_template is None:
        raise SystemExit(f"{engine.config.model_name} has no chat template; take a chat model")
    texts = [f"{'Again: ' * (i // len(QUESTIONS))}{QUESTIONS[i % len(QUESTIONS)]}" for i in range(count)]
    return [list(engine.chat_template.encode([{"role": "user", "content": text}])) for text in texts]


def run_huggingface(model: Any, prompts: Sequence[list[int]], max_tokens: int) -> Round:
    """One ``generate`` after another."""
    from hf_model import generate

    zero = time.perf_counter()
    samples = []
    for prompt in prompts:
        start = time.perf_counter()
        taken = generate(model, prompt, max_tokens)
        samples.append(
            Sample(
                prompt_tokens=len(prompt),
                token_ids=taken.token_ids,
                start_s=start - zero,
                first_s=taken.times[0] - zero,
                last_s=taken.times[-1] - zero,
            )
        )
    return Round(wall_s=time.perf_counter() - zero, samples=samples)


def run_octavo(engine: LoadedEngine, prompts: Sequence[list[int]], max_tokens: int, *, cache_salt: bytes) -> Round:
    """All at once. Times are taken here, where a caller would see the tokens."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    token_ids: list[list[int]] = [[] for _ in prompts]
    times: list[list[float]] = [[] for _ in prompts]
    zero = time.perf_counter()
    for index, prompt in enumerate(prompts):
        requests = make_requests(
            engine.config,
            prompt,
            sampling,
            request_id=str(index),
            arrival_s=time.monotonic(),
            cache_salt=cache_salt,
        )
        engine.submit(requests)
    while engine.core.has_unfinished:
        for output in engine.advance():
            index = int(output.request_id)
            if output.token_ids:
                token_ids[index].extend(output.token_ids)
                times[index].append(time.perf_counter() - zero)
    wall = time.perf_counter() - zero
    samples = [
        Sample(prompt_tokens=len(prompt), token_ids=ids, start_s=0.0, first_s=seen[0], last_s=seen[-1])
        for prompt, ids, seen in zip(prompts, token_ids, times, strict=True)
    ]
    return Round(wall_s=wall, samples=samples)


def figures(rounds: Sequence[Round]) -> dict[str, float]:
    """Medians over the rounds of wall time, throughput, and the requests' mean TTFT and TPOT."""

    def median(of: Callable[[Round], float]) -> float:
        return statistics.median(of(one) for one in rounds)

    def mean_tpot(one: Round) -> float:
        known = [s.tpot_s for s in one.samples if s.tpot_s is not None]
        return statistics.fmean(known) if known else float("nan")

    return {
        "wall_s": median(lambda one: one.wall_s),
        "tokens_per_s": median(lambda one: sum(len(s.token_ids) for s in one.samples) / one.wall_s),
        "mean_ttft_s": median(lambda one: statistics.fmean(s.first_s for s in one.samples)),
        "mean_own_ttft_s": median(lambda one: statistics.fmean(s.first_s - s.start_s for s in one.samples)),
        "mean_tpot_s": median(mean_tpot),
    }


def agreement(left: Round, right: Round) -> list[int]:
    """Per request, how many tokens agree before the first that differs (another rounding, a near tie)."""
    return [
        next((i for i, (a, b) in enumerate(zip(x.token_ids, y.token_ids, strict=False)) if a != b), len(x.token_ids))
        for x, y in zip(left.samples, right.samples, strict=True)
    ]


def _report(args: argparse.Namespace, engine: LoadedEngine, rounds: dict[str, list[Round]]) -> None:
    theirs, ours = figures(rounds["huggingface"]), figures(rounds["octavo"])
    config = engine.config
    table = Table(title=f"{args.num_requests} requests x {args.max_tokens} tokens, {config.model_name}, {config.dtype}")
    table.add_column("")
    for heading in ("Hugging Face", "octavo", "change"):
        table.add_column(heading, justify="right")
    for key, label, scale, unit in (
        ("wall_s", "wall time", 1, "s"),
        ("tokens_per_s", "throughput", 1, "tok/s"),
        ("mean_ttft_s", "mean TTFT", 1000, "ms"),
        ("mean_own_ttft_s", "mean TTFT of one's own turn", 1000, "ms"),
        ("mean_tpot_s", "mean TPOT", 1000, "ms"),
    ):
        before, after = theirs[key] * scale, ours[key] * scale
        digits = 2 if unit == "s" else 1
        table.add_row(
            label, f"{before:.{digits}f} {unit}", f"{after:.{digits}f} {unit}", f"{(after / before - 1) * 100:+.0f} %"
        )
    Console().print(table)
    same = agreement(rounds["huggingface"][0], rounds["octavo"][0])
    print(f"tokens that agree before the first difference, per request: {', '.join(map(str, same))}")
    save(
        Path(args.output),
        {
            "host": host_facts(),
            "arguments": vars(args),
            "config": {
                "model": config.model_name,
                "backend": config.backend,
                "dtype": config.dtype,
                "threads": config.threads,
                "fingerprint": config.system_fingerprint,
            },
            "medians": {"huggingface": theirs, "octavo": ours},
            "agreeing_tokens": same,
            "rounds": {name: [dataclasses.asdict(one) for one in done] for name, done in rounds.items()},
        },
    )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num-requests", type=_positive, default=5)
    parser.add_argument("--max-tokens", type=_positive, default=64)
    parser.add_argument("--rounds", type=_positive, default=3)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="auto", choices=("auto", "torch", "native"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "founding.json"))
    return parser.parse_args()


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


if __name__ == "__main__":
    main()
