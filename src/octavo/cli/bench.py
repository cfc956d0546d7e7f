"""``octavo bench``: how fast the engine is on this machine, offline, and any server over HTTP; every sample kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli import bench_serve, bound
from octavo.cli.console import remark
from octavo.cli.flags import with_config
from octavo.cli.sampling import Temperature
from octavo.cli.tables import Table, show
from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError

if TYPE_CHECKING:
    from octavo.cli.bench_throughput import CaseResult, ThroughputBench
    from octavo.cli.distributions import Lengths
    from octavo.engine.engine import Engine

app = typer.Typer(
    help="Measure the engine on this machine, or any server: random prompts, every sample in a JSON file.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
app.command()(bench_serve.serve)
app.command()(bench_serve.compare)

#: Prompts are random, so that a prefix cache would only make old prompts occupy memory.
_NO_PREFIX_CACHE = ("enable_prefix_caching", "share_prefix_cache")
#: How prompts are cut beside decodes does not matter to a figure that starts when all streams decode.
_NO_CHUNKING = ("chunking", "chunk_size", "target_itl_ms", "max_prefill_wait_s")

_Json = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", dir_okay=False, writable=True, help="Write every sample and the host's facts."
    ),
]
_Seed = Annotated[int, typer.Option(metavar="N", help="Of prompts, lengths and arrivals.")]


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _numbers(text: str) -> list[int]:
    """``1,8,32`` -> [1, 8, 32]; ``none`` -> []."""
    if text.strip() == "none":
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers from 1 up, such as 1,8,32, or none")
    return [int(part) for part in parts]


@app.command()
@with_config(omit=(*_NO_PREFIX_CACHE, *_NO_CHUNKING))
def throughput(
    engine: EngineConfig,
    streams: Annotated[
        str, typer.Option(metavar="N,N,...", help="Numbers of streams that decode together; none skips decoding.")
    ] = _joined(bound.STREAMS),
    context: Annotated[
        int, typer.Option(metavar="N", min=1, help="Positions that a decoding token sees, about.")
    ] = bound.CONTEXT,
    output_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Steps measured, all streams decoding in each.")
    ] = 32,
    prefill: Annotated[
        str, typer.Option(metavar="N,N,...", help="Prompt lengths to process; none skips prefill.")
    ] = _joined(bound.PREFILLS),
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Times that each case runs.")] = 3,
    temperature: Temperature = 0.0,
    seed: _Seed = 0,
    json_file: _Json = None,
) -> None:
    """Tokens per second of steady decoding and of prefill, as medians, beside the best that this machine could do."""
    counts, prompts = _numbers(streams), _numbers(prefill)
    if not counts and not prompts:
        raise typer.BadParameter("nothing is left to measure: give --streams or --prefill a number")

    from octavo.cli.bench_throughput import ThroughputBench
    from octavo.engine.load import load_engine

    wish = dataclasses.replace(
        engine,
        enable_prefix_caching=False,
        chunking="fixed",
        chunk_size=engine.max_num_batched_tokens,
        max_num_seqs=max([engine.max_num_seqs, *counts]),
    )
    loaded = load_engine(wish)
    try:
        bench = ThroughputBench(loaded, seed=seed, temperature=temperature)
        bench.warm_up()
        cases = []
        for count in counts:
            cases.append(bench.decode(count, context, output_tokens, repeats))
            remark(_progress(cases[-1]))
        for tokens in prompts:
            cases.append(bench.prefill(tokens, repeats))
            remark(_progress(cases[-1]))
    finally:
        loaded.close()
    show(throughput_table(cases, _title(loaded)))
    if json_file is not None:
        _save(json_file, loaded, _throughput_facts(bench, cases))


def _title(loaded: Engine) -> str:
    config = loaded.config
    return (
        f"{config.model_name}, {config.backend}, {config.threads} threads, numerics {config.wish.numerics}, "
        f"KV {config.kv_dtype}"
    )


def _progress(case: CaseResult) -> str:
    return f"{case.name}: {case.tokens_per_s:,.1f} tokens/s"


def throughput_table(cases: Sequence[CaseResult], title: str) -> Table:
    """Medians with their range, the share of the best possible, and where a step's time goes."""
    import statistics

    def median_ms(seconds: list[float]) -> str:
        return f"{statistics.median(seconds) * 1e3:.2f}"

    rows = []
    for case in cases:
        rates = [repeat.tokens_per_s for repeat in case.repeats]
        steps = [step for repeat in case.repeats for step in repeat.steps]
        best, share = case.bound_tokens_per_s, case.share_of_bound
        row = (
            case.name,
            f"{case.tokens_per_s:,.1f}",
            f"{min(rates):,.1f} - {max(rates):,.1f}",
            "-" if best is None else f"{best:,.0f} ({case.limit})",
            "-" if share is None else f"{share * 100:.0f} %",
            median_ms([step.wall_s for step in steps]),
            median_ms([step.forward_s for step in steps]),
            median_ms([step.sample_s for step in steps]),
            median_ms([step.overhead_s for step in steps]),
        )
        rows.append(row)
    figures = ("tokens/s", "min - max", "best possible", "reached")
    times = ("step ms", "forward ms", "sample ms", "rest ms")
    return Table(title=title, headings=("case", *figures, *times), rows=rows)


def _throughput_facts(bench: ThroughputBench, cases: Sequence[CaseResult]) -> dict[str, Any]:
    return {
        "machine_speed": dataclasses.asdict(bench.speed) if bench.speed else None,
        "model_cost": dataclasses.asdict(bench.cost) if bench.cost else None,
        "cases": [
            {
                "name": case.name,
                "tokens_per_s": case.tokens_per_s,
                "bound_tokens_per_s": case.bound_tokens_per_s,
                "share_of_bound": case.share_of_bound,
                **dataclasses.asdict(case),
            }
            for case in cases
        ],
    }


@app.command()
@with_config(omit=_NO_PREFIX_CACHE)
def latency(
    engine: EngineConfig,
    request_rate: Annotated[
        float | None,
        typer.Option(
            metavar="X", min=0.001, help="Requests per second, arriving at random. [default: see --concurrency]"
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Clients that each ask again once they have their answer. [default: 4]"),
    ] = None,
    num_requests: Annotated[int, typer.Option(metavar="N", min=1, help="Requests in all.")] = 32,
    prompt_tokens: Annotated[str, typer.Option(metavar="N or N:N", help="Length of prompts, or a range.")] = "32:512",
    output_tokens: Annotated[str, typer.Option(metavar="N or N:N", help="Length of answers, or a range.")] = "16:128",
    seed: _Seed = 0,
    json_file: _Json = None,
) -> None:
    """Time to first token (TTFT), per output token (TPOT) and between tokens (ITL), under a given load."""
    if request_rate is not None and concurrency is not None:
        raise typer.BadParameter("--request-rate and --concurrency exclude each other; give one")

    from octavo.cli.bench_latency import Workload, latencies, run_workload
    from octavo.engine.load import load_engine

    workload = Workload(
        num_requests=num_requests,
        request_rate=request_rate,
        concurrency=concurrency or 4,
        prompt_tokens=_lengths(prompt_tokens),
        output_tokens=_lengths(output_tokens),
        seed=seed,
    )
    loaded = load_engine(dataclasses.replace(engine, enable_prefix_caching=False))
    try:
        samples = run_workload(loaded, workload)
    finally:
        loaded.close()
    figures = latencies(samples)
    show(latency_table(figures, _title(loaded)))
    wall_s = max(sample.token_times_s[-1] for sample in samples)
    tokens = sum(len(sample.token_times_s) for sample in samples)
    load = f"{request_rate:g} requests/s" if request_rate else f"{workload.concurrency} clients"
    print(f"{num_requests} requests, {load}: {tokens} tokens in {wall_s:.2f} s, {tokens / wall_s:,.1f} tokens/s")
    if json_file is not None:
        facts = {
            "workload": dataclasses.asdict(workload),
            "wall_s": wall_s,
            "latencies": figures,
            "requests": [dataclasses.asdict(sample) for sample in samples],
        }
        _save(json_file, loaded, facts)


def _lengths(text: str) -> Lengths:
    from octavo.cli.distributions import Lengths

    try:
        return Lengths.parse(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


def latency_table(figures: Mapping[str, Mapping[str, float] | None], title: str) -> Table:
    """One row per kind of latency, in milliseconds."""
    rows = []
    for name, label in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("itl_s", "ITL")):
        found = figures[name]
        if found is None:
            rows.append((label, "0", *["-"] * 5))
            continue
        values = (f"{found[key] * 1e3:,.1f}" for key in ("mean", "p50", "p90", "p99", "max"))
        rows.append((label, f"{found['count']:.0f}", *values))
    return Table(title=title, headings=("ms", "samples", "mean", "P50", "P90", "P99", "max"), rows=rows)


def _save(path: Path, loaded: Engine, facts: dict[str, Any]) -> None:
    from octavo.cli.report import config_facts, host_facts, save

    save(path, {"host": host_facts(), "config": config_facts(loaded.config), **facts})
