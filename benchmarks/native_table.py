"""The native backend in one table: decoding, prefill, bfloat16 weights, start and memory, on whatever machine this is.

    python benchmarks/native_table.py            # 20 minutes on two slow cores
    python benchmarks/native_table.py --quick    # a minute: does it run?

Every speed is a median, beside its share of the best that this machine could do (octavo/cli/bound.py). Cases run in
rounds, each round all of them, so that a machine that is slower for a while is slower for every case. The speeds that
the backend is built to reach on TARGET_MACHINE stand beside them for scale.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bf16_copy import write_bf16_copy
from rich.console import Console
from rich.table import Table
from served_process import import_seconds, installed_environment, memory_bytes, served

from octavo.cli.bench_throughput import CaseResult, ThroughputBench
from octavo.cli.bound import CONTEXT
from octavo.cli.console import remark
from octavo.cli.report import config_facts, host_facts, save
from octavo.core.config import EngineConfig, Numerics
from octavo.core.request import Submission
from octavo.core.sampling_params import SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.load import load_engine
from octavo.engine.requests import make_requests
from octavo.hub.resolve import resolve_model
from octavo.kernels.base import MachineSpeed
from octavo.kernels.native.backend import NativeBackend

TARGET_MACHINE = "two cores of a Sapphire-Rapids-class Xeon (AMX)"
KV_STREAMS = 16  # sequences that fill the KV cache together
CHECK_PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time", "Water boils at")
CHECK_TOKENS = 32
WIDTH = 124  # of the printed table


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a speed in tokens per second, and what it should be on TARGET_MACHINE."""

    name: str
    weights: Literal["file", "bf16"]
    kind: Literal["decode", "prefill"]
    size: int  # streams, or tokens of the prompt
    target: int
    fast_target: int | None = None  # under --numerics fast, where it is another arithmetic


ROWS = (
    Row("1 stream decode", "file", "decode", 1, 220, 420),
    Row("8 streams", "file", "decode", 8, 1_050, 1_150),
    Row("32 streams", "file", "decode", 32, 1_750, 1_750),
    Row("64 streams", "file", "decode", 64, 1_950, 1_950),
    Row("prefill of 512", "file", "prefill", 512, 8_500),
    Row("prefill of 4,096", "file", "prefill", 4_096, 3_900),
    Row("bf16 weights, 1 stream", "bf16", "decode", 1, 80),
    Row("bf16 weights, 32 streams", "bf16", "decode", 32, 1_250),
)
TARGET_READY_S = 1.0
TARGET_MEMORY_BYTES, TARGET_KV_TOKENS = 1.0e9, 32_000

Engines = Mapping[str, Engine]  # "exact", "bf16", and "fast" where that differs
Results = dict[str, dict[str, CaseResult]]  # engine -> row name -> what was measured


def load(model: str, numerics: Numerics, threads: int | None) -> Engine:
    """The native engine as ``octavo bench throughput`` sets it up."""
    return load_engine(
        EngineConfig(
            model=model,
            backend="native",
            numerics=numerics,
            threads=threads,
            max_model_len=CONTEXT + max(row.size for row in ROWS if row.kind == "prefill"),
            enable_prefix_caching=False,
            chunking="fixed",
            chunk_size=EngineConfig().max_num_batched_tokens,
        )
    )


def isa_of(engine: Engine) -> str:
    backend = engine.runner.backend
    assert isinstance(backend, NativeBackend)
    return backend.isa


def rows_of(engine: str, rows: Sequence[Row]) -> list[Row]:
    """The rows that an engine fills."""
    if engine == "fast":
        return [row for row in rows if row.fast_target is not None]
    return [row for row in rows if row.weights == ("bf16" if engine == "bf16" else "file")]


def measure_speeds(engines: Engines, rows: Sequence[Row], args: argparse.Namespace) -> tuple[Results, MachineSpeed]:
    """All rows on all engines, round by round; the machine's own speed is measured again before each round."""
    benches = {name: ThroughputBench(engine) for name, engine in engines.items()}
    for bench in benches.values():
        bench.warm_up()
    rounds: dict[tuple[str, str], list[CaseResult]] = {}
    speed: MachineSpeed | None = None
    for index in range(max(args.repeats, args.prefill_repeats)):
        remark(f"round {index + 1}")
        for name, bench in benches.items():
            measured = bench.speed if index == 0 else engines[name].runner.backend.measure_machine()
            assert measured is not None, "the native backend tells its machine's speed"
            speed = measured if speed is None else best_of(speed, measured)
        for name, bench in benches.items():
            bench.speed = speed
            for row in rows_of(name, rows):
                if row.kind == "decode" and index < args.repeats:
                    case = bench.decode(row.size, CONTEXT, args.steps, 1)
                elif row.kind == "prefill" and index < args.prefill_repeats:
                    case = bench.prefill(row.size, 1)
                else:
                    continue
                rounds.setdefault((name, row.name), []).append(case)
                remark(f"  {name}: {row.name}: {case.tokens_per_s:,.1f} tokens/s")
    results: Results = {}
    for (name, row_name), cases in rounds.items():
        results.setdefault(name, {})[row_name] = joined(cases)
    assert speed is not None
    return results, speed


def best_of(one: MachineSpeed, other: MachineSpeed) -> MachineSpeed:
    """The faster of two measurements, rate by rate: whatever disturbs a machine makes it slower."""
    reads = zip(one.read_bytes_per_s, other.read_bytes_per_s, strict=True)
    return MachineSpeed(
        read_bytes_per_s=tuple((size, max(rate, again)) for (size, rate), (_, again) in reads),
        macs_per_s={kind: max(rate, other.macs_per_s[kind]) for kind, rate in one.macs_per_s.items()},
    )


def joined(rounds: Sequence[CaseResult]) -> CaseResult:
    """One case's rounds as its repeats. The bound is the last one's, which knows the best of all machine speeds."""
    return dataclasses.replace(rounds[-1], repeats=[repeat for case in rounds for repeat in case.repeats])


def greedy(engine: Engine, prompt: str) -> list[int]:
    """The tokens of a greedy answer of CHECK_TOKENS tokens."""
    sampling = SamplingParams(temperature=0.0, max_tokens=CHECK_TOKENS, ignore_eos=True)
    prompt_token_ids = engine.tokenizer.encode(prompt)
    engine.submit(
        make_requests(
            engine.config,
            Submission(request_id=prompt, prompt_token_ids=prompt_token_ids, sampling=sampling),
            arrival_s=time.monotonic(),
        )
    )
    tokens: list[int] = []
    while engine.has_unfinished:
        tokens += [token for output in engine.step() for token in output.token_ids]
    return tokens


def compare_answers(engines: Engines) -> list[dict[str, Any]]:
    """Greedy answers with the file's weights and with their bfloat16 copy. SystemExit if no first token is the same."""
    found = []
    for prompt in CHECK_PROMPTS:
        file, bf16 = (greedy(engines[name], prompt) for name in ("exact", "bf16"))
        equal = next((i for i, (a, b) in enumerate(zip(file, bf16, strict=True)) if a != b), CHECK_TOKENS)
        texts = {name: engines["exact"].tokenizer.decode(ids) for name, ids in (("file", file), ("bf16", bf16))}
        found.append({"prompt": prompt, "equal_tokens": equal, "tokens": CHECK_TOKENS, **texts})
    if not any(answer["equal_tokens"] for answer in found):
        raise SystemExit(f"the bfloat16 copy of the weights answers otherwise from the first token on: {found}")
    return found


def measure_start(model: str, args: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """Starts of ``octavo serve`` up to its first 200, after one that fills the byte code cache."""
    arguments = [model, *_threads(args)]
    samples = []
    for index in range(args.starts + 1):
        with served(arguments, environment) as server:
            if index:
                samples.append({"ready_s": server.ready_s, "cpu_s": server.cpu_s})
                remark(f"ready after {server.ready_s:.2f} s")
    return {"samples": samples, "import_s": import_seconds(environment)}


def measure_memory(
    model: str, engine: Engine, args: argparse.Namespace, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Memory of a server with every block of its KV cache written. SystemExit if a block stays free.

    engine: of the same model, to know its vocabulary and what a token's KV takes
    """
    cost = engine.runner.backend.model_cost()
    assert cost is not None, "the native backend tells what a model costs"
    length = args.kv_tokens // KV_STREAMS
    kv_bytes = args.kv_tokens * cost.kv_bytes
    pool = ["--kv-cache-memory", str(kv_bytes), "--max-num-seqs", str(KV_STREAMS), "--max-model-len", str(length + 1)]
    with served([model, *pool, *_threads(args)], environment) as server:
        ready = memory_bytes(server.pid)
        rng, name = random.Random(0), server.ask("GET", "/v1/models")["data"][0]["id"]

        def complete(prompt: list[int]) -> None:
            # the last token is drawn and not run, so that exactly ``length`` positions have KV: whole blocks
            max_tokens = length + 1 - len(prompt)
            body = {"model": name, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
            server.ask("POST", "/v1/completions", body)

        vocabulary = engine.config.vocab_size
        prompts = [[rng.randrange(vocabulary) for _ in range(length - 4)] for _ in range(KV_STREAMS)]
        remark(f"filling {args.kv_tokens:,} tokens of KV ...")
        with ThreadPoolExecutor(KV_STREAMS) as clients:
            list(clients.map(complete, prompts))
        cache = server.ask("GET", "/v1/stats")["kv_cache"]
        if cache["free_blocks"]:
            raise SystemExit(f"{cache['free_blocks']} of {cache['blocks']} KV blocks are still free; the fill is wrong")
        return {"kv_bytes": kv_bytes, "kv_cache": cache, "at_ready": ready, "filled": memory_bytes(server.pid)}


def _threads(args: argparse.Namespace) -> list[str]:
    return [] if args.threads is None else ["--threads", str(args.threads)]


def report(facts: Mapping[str, Any], results: Results, rows: Sequence[Row], title: str) -> Table:
    """The table; ``facts`` as they are saved."""
    with_fast = "fast" in results
    table = Table(title=title, title_justify="left", box=None)
    for heading in ("", "exact", "min - max", "best possible", "reached", *(["fast", "reached"] * with_fast), "target"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in rows:
        case = results["bf16" if row.weights == "bf16" else "exact"][row.name]
        rates = [repeat.tokens_per_s for repeat in case.repeats]
        cells = [
            f"{case.tokens_per_s:,.0f}",
            f"{min(rates):,.0f} - {max(rates):,.0f}",
            f"{case.bound_tokens_per_s:,.0f} ({case.limit})",
            f"{case.share_of_bound:.0%}",
        ]
        if with_fast:
            fast = results["fast"].get(row.name)
            cells += ["", ""] if fast is None else [f"{fast.tokens_per_s:,.0f}", f"{fast.share_of_bound:.0%}"]
        target = f"{row.target:,}" + (f", fast {row.fast_target:,}" if row.fast_target is not None else "")
        table.add_row(row.name, *cells, target)
    for cells in (*start_cells(facts["start"]), *memory_cells(facts)):
        table.add_row(*cells[:5], *([""] * 2 * with_fast), cells[5])
    return table


def start_cells(start: Mapping[str, Any]) -> Iterator[list[str]]:
    seconds = [sample["ready_s"] for sample in start["samples"]]
    spread = f"{min(seconds):.2f} - {max(seconds):.2f}"
    yield ["ready to serve", f"{statistics.median(seconds):.2f} s", spread, "", "", f"{TARGET_READY_S:.0f} s"]


def memory_cells(facts: Mapping[str, Any]) -> Iterator[list[str]]:
    memory = facts["memory"]
    if memory["filled"] is None:  # no Linux
        return
    needed, resident = facts["config"]["weights_bytes"] + memory["kv_bytes"], memory["filled"]["VmRSS"]
    name = f"memory at {facts['arguments']['kv_tokens']:,} tokens of KV"
    bound = f"{needed / 1e9:.2f} (weights, KV)"
    target = f"{TARGET_MEMORY_BYTES / 1e9:.1f} GB" if facts["arguments"]["kv_tokens"] == TARGET_KV_TOKENS else ""
    yield [name, f"{resident / 1e9:.2f} GB", "", bound, f"{needed / resident:.0%}", target]


def remarks(facts: Mapping[str, Any], isa: str) -> Iterator[str]:
    """What the table does not say."""
    if "fast" not in facts["cases"]:
        yield f"On {isa}, --numerics fast runs the same kernels as exact: one column stands for both."
    yield f"Targets: tokens/s, for {TARGET_MACHINE}. Decoding is around position {CONTEXT}."
    start = facts["start"]
    imports = start["import_s"]
    largest = ", ".join(f"{name} {seconds:.2f}" for name, seconds in list(imports.items())[:6])
    cpu_s = [sample["cpu_s"] for sample in start["samples"] if sample["cpu_s"] is not None]
    cpu = f", {statistics.median(cpu_s):.2f} s of processor time" if cpu_s else ""
    importing = f"imports {sum(imports.values()):.2f} s under -X importtime ({largest})"
    yield f"Start{cpu}: {importing}, the model {start['load_s']:.2f} s."
    filled = facts["memory"]["filled"]
    if filled is not None:
        rest = filled["VmRSS"] - facts["config"]["weights_bytes"] - facts["memory"]["kv_bytes"]
        yield (
            f"Memory: beside weights and KV {rest / 1e6:.0f} MB, of which {filled['RssFile'] / 1e6:.0f} MB libraries; "
            f"peak {filled['VmHWM'] / 1e6:.0f} MB, proportional (PSS) {filled['Pss'] / 1e6:.0f} MB."
        )
    equal = sum(answer["equal_tokens"] for answer in facts["answers"])
    yield f"bfloat16 weights: {equal} of {CHECK_TOKENS * len(facts['answers'])} greedy tokens before answers part."


def run(args: argparse.Namespace) -> None:
    rows = [row for row in ROWS if not args.quick or row.size <= (8 if row.kind == "decode" else 512)]
    path = resolve_model(args.model).path
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = installed_environment(folder / "bytecode")
        bf16 = folder / f"{path.stem}-BF16.gguf"
        write_bf16_copy(path, bf16)
        # servers first: alone on the machine
        start = measure_start(args.model, args, environment)
        engines = {"exact": stack.enter_context(closing(load(args.model, "exact", args.threads)))}
        isa, config = isa_of(engines["exact"]), config_facts(engines["exact"].config)
        start["load_s"] = engines["exact"].load_s
        memory = measure_memory(args.model, engines["exact"], args, environment)
        if isa == "amx":
            engines["fast"] = stack.enter_context(closing(load(args.model, "fast", args.threads)))
        engines["bf16"] = stack.enter_context(closing(load(str(bf16), "exact", args.threads)))
        answers = compare_answers(engines)
        results, speed = measure_speeds(engines, rows, args)
    facts: dict[str, Any] = {
        "host": host_facts(),
        "arguments": vars(args),
        "isa": isa,
        "config": config,
        "targets": {"machine": TARGET_MACHINE, "rows": [dataclasses.asdict(row) for row in ROWS]},
        "machine_speed": dataclasses.asdict(speed),
        "start": start,
        "memory": memory,
        "answers": answers,
        "cases": {name: {key: case_facts(case) for key, case in cases.items()} for name, cases in results.items()},
    }
    console = Console(width=max(WIDTH, Console().width))
    console.print(report(facts, results, rows, f"{config['model']}, {isa}, {config['threads']} threads, tokens/s"))
    for line in remarks(facts, isa):
        console.print(line, soft_wrap=True, highlight=False)
    save(Path(args.output), facts)


def case_facts(case: CaseResult) -> dict[str, Any]:
    return {
        "tokens_per_s": case.tokens_per_s,
        "bound_tokens_per_s": case.bound_tokens_per_s,
        "share_of_bound": case.share_of_bound,
        **dataclasses.asdict(case),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="alias or path of a GGUF model")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=5, help="rounds of decoding")
    parser.add_argument("--prefill-repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=32, help="decode steps measured per round")
    parser.add_argument("--starts", type=int, default=5, help="starts of a server")
    parser.add_argument("--kv-tokens", type=int, default=TARGET_KV_TOKENS)
    parser.add_argument("--quick", action="store_true", help="small cases once: a smoke run")
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "native-table.json"))
    args = parser.parse_args()
    if args.quick:
        args.repeats = args.prefill_repeats = args.starts = 1
        args.steps, args.kv_tokens = 4, 4_096
    if args.kv_tokens % (KV_STREAMS * EngineConfig().block_size):
        parser.error(f"--kv-tokens {args.kv_tokens} are not whole KV blocks for {KV_STREAMS} equal sequences")
    run(args)


if __name__ == "__main__":
    main()
