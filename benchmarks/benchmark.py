"""The founding benchmark: Hugging Face ``generate``, one prompt after another, against octavo, all prompts at once.

    python benchmarks/benchmark.py --num-requests 5 --max-tokens 64
    python benchmarks/benchmark.py --model tinyllama-1.1b --load-format dummy --dtype float32 --temperature 0.8
    python benchmarks/benchmark.py --prefix-demo

Both run in this process on the same numbers, threads and prompts, to exactly ``--max-tokens`` tokens. All requests
arrive together at time zero, so a TTFT counts the wait for one's turn; "TTFT of one's own turn" leaves it out. Rounds
alternate between the two, and the table shows medians over the rounds. octavo's prefix cache is cold at the start of
each round; within a round, prompts that start alike share what they share. ``--prefix-demo`` puts one long system
prompt before all questions, and adds a round in which an earlier chat has left it in the cache.

``--load-format dummy`` takes random weights in the shape of --model: a name in ``dummy_model.SHAPES``, a folder with
config.json, or a GGUF file. ``--dtype`` is then how octavo stores them; Hugging Face computes with the very same
numbers, in float32 for float32 and else in bfloat16 (it has no int8 or int4 for the CPU). Without it, octavo's native
backend takes the file's own format, and --dtype says what Hugging Face computes in.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dummy_model import SHAPES, write_shape_folder
from founding_report import (
    Round,
    Sample,
    agreement,
    bandwidth_argument,
    bound_facts,
    figures,
    memory_bound,
    ratios,
    table,
)
from rich.console import Console

from octavo.cli.report import host_facts, save
from octavo.core.config import DummyFormat, EngineConfig
from octavo.core.request import Submission
from octavo.core.sampling_params import SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.load import load_engine
from octavo.engine.requests import make_requests
from octavo.model.dummy import open_dummy
from octavo.model.open_model import open_weights

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
RULES = (
    "You answer questions of visitors to a small museum of navigation.",
    "Answer in plain words, and in the language of the question.",
    "If you do not know something, say so and name the desk on the first floor.",
    "Never give opening hours other than those on the door: ten to six, Mondays closed.",
    "Mention the lighthouse lens in the great hall where it fits, but not twice in one answer.",
)
WARMING = "Where can I leave my coat?"
FORMATS: dict[str, DummyFormat] = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}


def main() -> None:
    args = _parse_arguments()
    with tempfile.TemporaryDirectory(prefix="octavo-shape-") as folder:
        engine = load_engine(engine_config(args, Path(folder)))
        peer = load_peer(args, engine)
    prompts = chat_prompts(engine, args.num_requests, system_tokens=args.system_tokens if args.prefix_demo else 0)
    prompts = [prompt[: args.prompt_tokens] for prompt in prompts]
    rounds = measure(args, engine, peer, prompts)
    bound = memory_bound(engine, peer, args.num_requests, max(map(len, prompts)) + args.max_tokens // 2)
    engine.close()
    medians = {name: figures(done) for name, done in rounds.items()}
    title = f"{args.num_requests} requests x {args.max_tokens} tokens, {engine.config.model_name}, {args.dtype}"
    Console().print(table(title, medians))
    if bound is not None:
        print(bandwidth_argument(bound, args.num_requests, args.max_tokens, medians))
    same = None
    if args.temperature == 0:
        same = agreement(rounds["huggingface"][0], rounds[octavo_runs(args)[-1]][0])
        print(f"tokens that agree before the first difference, per request: {', '.join(map(str, same))}")
    config = engine.config
    payload = {
        "host": host_facts(),
        "arguments": {name: value for name, value in vars(args).items() if name != "output"},
        "config": {
            "model": config.model_name,
            "backend": config.backend,
            "dtype": config.dtype,
            "threads": config.threads,
            "fingerprint": config.system_fingerprint,
            "weights_bytes": config.weights_bytes,
        },
        "medians": medians,
        "times_better": {name: ratios(medians["huggingface"], medians[name]) for name in octavo_runs(args)},
        "memory_bound": bound_facts(bound),
        "agreeing_tokens": same,
        "rounds": {name: [dataclasses.asdict(one) for one in done] for name, done in rounds.items()},
    }
    if args.output is not None:
        save(args.output, payload)


def engine_config(args: argparse.Namespace, folder: Path) -> EngineConfig:
    """folder: where the config.json of a named shape may be written."""
    options: dict[str, Any] = {
        "backend": args.backend,
        "device": "cpu",
        "threads": args.threads,
        "kv_cache_memory": args.kv_cache_memory,
    }
    if args.load_format == "dummy":
        model = str(write_shape_folder(args.model, folder)) if args.model in SHAPES else args.model
        return EngineConfig(model=model, load_format="dummy", dummy_format=FORMATS[args.dtype], **options)
    return EngineConfig(model=args.model, dtype=args.dtype, **options)


def load_peer(args: argparse.Namespace, engine: Engine) -> Any:
    """The transformers model with octavo's numbers."""
    import torch  # after load_engine, which has set the number of threads
    from hf_model import load_llama

    torch.set_num_threads(engine.config.threads)
    path = Path(engine.config.model_path)
    source = open_dummy(path, FORMATS[args.dtype]) if args.load_format == "dummy" else open_weights(path)
    try:
        return load_llama(source, torch.float32 if args.dtype == "float32" else torch.bfloat16)
    finally:
        source.close()


def chat_prompts(engine: Engine, count: int, *, system_tokens: int = 0) -> list[list[int]]:
    """Token ids of ``count`` different chats of different lengths, after a system prompt of about that many tokens."""
    questions = [f"{'Again: ' * (i // len(QUESTIONS))}{QUESTIONS[i % len(QUESTIONS)]}" for i in range(count)]
    rules = ""
    for rule in itertools.cycle(RULES):
        if len(engine.tokenizer.encode(rules)) >= system_tokens:
            break
        rules += f"{rule} "
    return [_chat(engine, rules, question) for question in questions]


def _chat(engine: Engine, rules: str, question: str) -> list[int]:
    if engine.chat_template is None:  # a base model
        return engine.tokenizer.encode(f"{rules}{question}\n")
    system = [{"role": "system", "content": rules}] if rules else []
    return list(engine.chat_template.encode([*system, {"role": "user", "content": question}]))


def octavo_runs(args: argparse.Namespace) -> list[str]:
    """Names of octavo's runs in a round."""
    return ["octavo_cold", "octavo_warm"] if args.prefix_demo else ["octavo"]


def measure(
    args: argparse.Namespace, engine: Engine, peer: Any, prompts: Sequence[list[int]]
) -> dict[str, list[Round]]:
    """Every run once per round; a short round before the first warms up and is not counted."""
    salts = (str(number).encode() for number in itertools.count())

    def octavo(given: Sequence[list[int]], max_tokens: int, salt: bytes) -> Round:
        return run_octavo(engine, given, max_tokens, cache_salt=salt, temperature=args.temperature)

    def warm(given: Sequence[list[int]], max_tokens: int) -> Round:
        salt, shared = next(salts), _shared_head(prompts)
        octavo([given[0][:shared] + engine.tokenizer.encode(WARMING, add_bos=False)], 1, salt)
        return octavo(given, max_tokens, salt)

    def huggingface(given: Sequence[list[int]], max_tokens: int) -> Round:
        return run_huggingface(peer, given, max_tokens, temperature=args.temperature)

    runs: dict[str, Callable[[Sequence[list[int]], int], Round]] = {"huggingface": huggingface}
    for name in octavo_runs(args):
        runs[name] = warm if name == "octavo_warm" else lambda given, n: octavo(given, n, next(salts))
    rounds: dict[str, list[Round]] = {name: [] for name in runs}
    for number in range(-1, args.rounds):
        for name, run in runs.items():
            if number < 0:
                run(prompts[:1], 4)
                continue
            rounds[name].append(run(prompts, args.max_tokens))
            print(f"round {number + 1} of {args.rounds}: {name} {rounds[name][-1].wall_s:.2f} s", file=sys.stderr)
    return rounds


def _shared_head(prompts: Sequence[list[int]]) -> int:
    """How many leading tokens all have in common."""
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False)))


def run_huggingface(model: Any, prompts: Sequence[list[int]], max_tokens: int, *, temperature: float = 0.0) -> Round:
    """One ``generate`` after another."""
    from hf_model import generate

    zero = time.perf_counter()
    samples = []
    for prompt in prompts:
        start = time.perf_counter()
        taken = generate(model, prompt, max_tokens, temperature=temperature)
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


def run_octavo(
    engine: Engine,
    prompts: Sequence[list[int]],
    max_tokens: int,
    *,
    cache_salt: bytes,
    temperature: float = 0.0,
) -> Round:
    """All at once. Times are taken here, where a caller would see the tokens."""
    token_ids: list[list[int]] = [[] for _ in prompts]
    times: list[list[float]] = [[] for _ in prompts]
    cached = [0] * len(prompts)
    zero = time.perf_counter()
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=temperature, seed=index, max_tokens=max_tokens, ignore_eos=True)
        requests = make_requests(
            engine.config,
            Submission(request_id=str(index), prompt_token_ids=prompt, sampling=sampling, cache_salt=cache_salt),
            arrival_s=time.monotonic(),
        )
        engine.submit(requests)
    while engine.has_unfinished:
        for output in engine.step():
            index = int(output.request_id)
            if output.token_ids:
                token_ids[index].extend(output.token_ids)
                times[index].append(time.perf_counter() - zero)
            if output.usage is not None:
                cached[index] = output.usage.cached_tokens
    wall = time.perf_counter() - zero
    samples = [
        Sample(
            prompt_tokens=len(prompts[i]),
            token_ids=token_ids[i],
            start_s=0.0,
            first_s=times[i][0],
            last_s=times[i][-1],
            cached_tokens=cached[i],
        )
        for i in range(len(prompts))
    ]
    return Round(wall_s=wall, samples=samples)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=_positive, default=5)
    parser.add_argument("--max-tokens", type=_positive, default=64)
    parser.add_argument("--rounds", type=_positive, default=3)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--backend", default="auto", choices=("auto", "torch", "native"))
    parser.add_argument("--dtype", default="float32", choices=tuple(FORMATS))
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--prompt-tokens", type=_positive, help="cut each prompt to at most so many; default: whole")
    parser.add_argument("--prefix-demo", action="store_true", help="one system prompt before all questions")
    parser.add_argument("--system-tokens", type=_positive, default=512, help="--prefix-demo: its length")
    parser.add_argument("--threads", type=_positive, help="of both; default: the cores this process may use")
    parser.add_argument("--kv-cache-memory", type=_positive, default=1 << 29, help="bytes; default: 512 MiB")
    parser.add_argument("--output", type=Path, help="JSON file with every sample; default: none is written")
    args = parser.parse_args()
    if args.load_format == "auto" and args.dtype not in ("float32", "bfloat16"):
        parser.error(f"--dtype {args.dtype} needs --load-format dummy; a file has the format that it has")
    return args


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


if __name__ == "__main__":
    main()
