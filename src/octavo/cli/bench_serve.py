"""``octavo bench serve``: a load client for any OpenAI-compatible server. ``octavo.cli.load`` does the work."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from octavo.cli.console import remark
from octavo.cli.load import flags
from octavo.core.errors import ConfigError

if TYPE_CHECKING:
    from octavo.cli.load.arrivals import Arrivals
    from octavo.cli.load.measures import Target
    from octavo.cli.load.plan import Plan
    from octavo.cli.load.runner import Run
    from octavo.cli.load.server import Server, Wishes

T = TypeVar("T")


def serve(
    url: flags.Url,
    model: flags.Model = None,
    api_key: flags.ApiKey = None,
    endpoint: flags.Endpoint = "completions",
    num_requests: flags.NumRequests = None,
    concurrency: flags.Concurrency = None,
    rate: flags.Rate = None,
    burstiness: flags.Burstiness = 1.0,
    trace: flags.Trace = None,
    speed: flags.Speed = 1.0,
    long_prompt: flags.LongPrompt = None,
    num_long: flags.NumLong = 3,
    long_every: flags.LongEvery = 5.0,
    prompts: flags.Prompts = "auto",
    id_range: flags.IdRange = "1000:29999",
    prompt_tokens: flags.PromptTokens = "128",
    output_tokens: flags.OutputTokens = "64",
    ignore_eos: flags.IgnoreEos = True,
    shared_prefix: flags.SharedPrefix = 0,
    prefix_groups: flags.PrefixGroups = 1,
    schema: flags.Schema = None,
    tools: flags.Tools = None,
    temperature: flags.Temperature = 0.0,
    token_ids: flags.TokenIds = False,
    extra_body: flags.ExtraBody = "{}",
    warmup: flags.Warmup = 1,
    timeout: flags.Timeout = 600.0,
    seed: flags.Seed = 0,
    goodput: flags.Goodput = None,
    json_file: flags.Json = None,
    plot: flags.Plot = None,
) -> None:
    """Load a running server, whoever made it: latencies, throughput, goodput, failures, with every sample kept."""
    from octavo.cli.distributions import Lengths
    from octavo.cli.load.measures import Target
    from octavo.cli.load.plan import Plan
    from octavo.cli.load.server import Wishes
    from octavo.cli.load.trace import read_trace
    from octavo.cli.load.workload import Workload

    _make_room(json_file, plot)
    arrivals = _arrivals(concurrency, rate, burstiness, trace, long_prompt, num_requests)
    target = _usage(Target.parse, " ".join(goodput or ()).split())
    form = _form(schema, tools, endpoint)
    entries = read_trace(trace, endpoint) if trace is not None else []
    wishes = Wishes(
        endpoint=endpoint,
        model=model,
        prompts=prompts,
        id_range=_usage(Lengths.parse, id_range),
        has_prefix=shared_prefix > 0 or any(entry.prefix_tokens for entry in entries),
        seed=seed,
        temperature=temperature,
        ignore_eos=ignore_eos,
        token_ids=token_ids,
        extra=_parsed("--extra-body", extra_body, dict),
        timeout_s=timeout,
    )
    plan = Plan(
        workload=Workload(
            prompt_tokens=_usage(Lengths.parse, prompt_tokens),
            output_tokens=_usage(Lengths.parse, output_tokens),
            shared_prefix=shared_prefix,
            prefix_groups=prefix_groups,
            **form,
            has_fixed_length=ignore_eos,
        ),
        arrivals=arrivals,
        num_requests=num_requests or len(entries) or max(32, 3 * (arrivals.concurrency or 0)),
        warmup=warmup,
        seed=seed,
        trace=entries,
        speed=speed,
        long_prompt=_usage(Lengths.parse, long_prompt) if long_prompt is not None else None,
        num_long=num_long,
        long_every_s=long_every,
    )
    server, run = asyncio.run(_run(url, api_key, wishes, plan))
    raise typer.Exit(_tell(server, run, plan, target, (json_file, plot), api_key))


def _usage(parse: Callable[[Any], T], text: Any) -> T:
    """A wrong value is a usage error."""
    try:
        return parse(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


def _make_room(json_file: Path | None, plot: Path | None) -> None:
    """Files that cannot be written are better met now than after the run."""
    if plot is not None and plot.suffix != ".svg":
        raise typer.BadParameter(f"--plot draws SVG; name the file {plot.with_suffix('.svg')}")
    for file in filter(None, (json_file, plot)):
        _check_writable(file)


def _check_writable(file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error


def _arrivals(
    concurrency: int | None,
    rate: float | None,
    burstiness: float,
    trace: Path | None,
    long_prompt: str | None,
    num_requests: int | None,
) -> Arrivals:
    """From flags of which not all go together."""
    from octavo.cli.load.arrivals import Arrivals

    is_trace, is_long = trace is not None, long_prompt is not None
    if is_long and (is_trace or num_requests is not None):
        raise typer.BadParameter("--long-prompt goes with neither --trace nor --num-requests; there is --num-long")
    if rate is not None and (concurrency is not None or is_trace or is_long):
        raise typer.BadParameter("--rate goes with none of --concurrency, --trace and --long-prompt")
    if is_trace and concurrency is not None:
        raise typer.BadParameter("--trace has arrival times of its own; leave --concurrency out")
    if burstiness != 1.0 and rate is None:
        raise typer.BadParameter("--burstiness is of the gaps that --rate makes; give --rate")
    closed = rate is None and not is_trace
    return Arrivals(concurrency=(concurrency or 8) if closed else None, rate=rate, burstiness=burstiness)


def _form(schema: str | None, tools: str | None, endpoint: str) -> dict[str, Any]:
    """What a Workload must know about answers in form: ``fields`` that ask for it, and what to ``expect``."""
    from octavo.cli.load.workload import EXAMPLE_SCHEMA, EXAMPLE_TOOLS

    if schema is None and tools is None:
        return {}
    if schema is not None and tools is not None:
        raise typer.BadParameter("--schema and --tools exclude each other; give one")
    if endpoint != "chat":
        raise typer.BadParameter("--schema and --tools go with --endpoint chat")
    if schema is not None:
        wanted = EXAMPLE_SCHEMA if schema == "example" else _parsed("--schema", _read(schema), dict)
        form = {"name": "answer", "schema": wanted, "strict": True}
        return {"fields": {"response_format": {"type": "json_schema", "json_schema": form}}, "expect": "json"}
    assert tools is not None
    offered = EXAMPLE_TOOLS if tools == "example" else _parsed("--tools", _read(tools), list)
    return {"fields": {"tools": offered, "tool_choice": "required"}, "expect": "tool_calls"}


def _read(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {name}: {error.strerror if isinstance(error, OSError) else error}") from error


def _parsed(flag: str, text: str, kind: type[T]) -> T:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{flag} is not JSON: {error}") from error
    if not isinstance(found, kind):
        raise typer.BadParameter(f"{flag} must be a JSON {'object' if kind is dict else 'list'}")
    return found


async def _run(url: str, api_key: str | None, wishes: Wishes, plan: Plan) -> tuple[Server, Run]:
    from octavo.cli.load.plan import execute
    from octavo.cli.load.runner import RunClock
    from octavo.cli.load.server import client_of, find_out

    clock = RunClock()
    async with client_of(url, api_key, clock) as client:
        server = await find_out(client, wishes, clock)
        remark(f"{server.model} at {client.url}, {wishes.endpoint}, {server.asker.maker}: {plan}")
        with _progress(plan) as on_progress:
            return server, await execute(plan, server, clock, on_progress)


@contextmanager
def _progress(plan: Plan) -> Iterator[Callable[[Run], None]]:
    """A bar on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda run: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    # drawn when we say so: a thread of its own would wake in the middle of what is measured
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        counted = "long" if plan.long_prompt is not None else ""
        total = min(plan.num_requests, len(plan.trace) or plan.num_requests)
        task = bar.add_task("", total=plan.num_long if counted else total)
        seen = tokens = failed = done = 0

        def show(run: Run) -> None:
            nonlocal seen, tokens, failed, done
            for sample in run.samples[seen:]:
                tokens += sample.output_tokens
                failed += sample.failure is not None
                done += sample.group == counted
            seen = len(run.samples)
            bar.update(task, completed=done, description=f"{tokens:,} tokens, {failed} failed", refresh=True)

        yield show


def _tell(
    server: Server, run: Run, plan: Plan, target: Target, files: tuple[Path | None, Path | None], api_key: str | None
) -> int:
    """The report to standard output, then the files. Returns the exit code: 130 after Ctrl-C, 1 without an answer."""
    from octavo.cli.load.run_report import report, width

    print(report(run, target, server.notes, width(), shares_prompts=plan.shares_prompts))
    json_file, plot = files
    if json_file is not None:
        from octavo.cli.load.record import record
        from octavo.cli.report import save

        save(json_file, record(server, run, plan, target, api_key))
    if plot is not None:
        from octavo.cli.load.plot import figure

        plot.write_text(figure(run.samples, f"{server.model}: {plan}"), encoding="utf-8")
        remark(f"plot: {plot}")
    if run.was_interrupted:
        return 130
    return int(all(sample.failure is not None for sample in run.samples))


def compare(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="A result of bench serve --json.")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="Another; ratios are B over A.")],
    seed: Annotated[int, typer.Option(metavar="N", help="Of the resampling.")] = 0,
) -> None:
    """Two results of bench serve: ratios of every measure, with bootstrap intervals."""
    from octavo.cli.load.compare import compare, differences, ratio_table
    from octavo.cli.load.record import read_record
    from octavo.cli.load.run_report import width, wrapped
    from octavo.cli.tables import show

    one, other = read_record(a), read_record(b)
    columns = width()
    print(wrapped(f"A: {a}", columns))
    print(wrapped(f"B: {b}", columns) + "\n")
    show(ratio_table(compare(one, other, seed)))
    if told := differences(one, other):
        print("\nAlso different:\n" + "\n".join(wrapped(line, columns, "    ", "  ") for line in told))
