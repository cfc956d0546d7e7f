"""Writes docs/benchmarks.md, its plots and the README's table from the stored runs: no number in them is typed by hand.

python benchmarks/peers/page.py            # from benchmarks/results/peers-*.json
python benchmarks/peers/page.py --check    # exits with 1 if a page is not what the stored runs say
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from plot import ratio_plot
from results import Results, load
from tables import (
    ABOUT,
    failure_lines,
    figure_tables,
    figures_of,
    heading,
    note_lines,
    ratio_tables,
    shown,
    start_table,
)
from workloads import WORKLOADS

ROOT = Path(__file__).resolve().parents[2]
PAGE, README, STORED = Path("docs/benchmarks.md"), Path("README.md"), Path("benchmarks/results")
MARKS = ("<!-- from benchmarks/peers/page.py -->", "<!-- end -->")

_INTRO = """# octavo beside what people would use instead

This page is written by `benchmarks/peers/page.py` from the runs in `benchmarks/results/peers-*.json`, which hold every
sample. Absolute figures move from machine to machine and from hour to hour. What counts are the ratios of servers that
took turns on the same machine, with the same weights, asked by the same client.

## Repeat it

```sh
python benchmarks/peers/install.py                 # llama.cpp, vLLM, OpenVINO GenAI, transformers: what can be had
python benchmarks/peers/run.py --budget-minutes 25 # whichever of them are installed
python benchmarks/peers/run.py --model 1.1b        # random weights in the shape of TinyLlama-1.1B
python benchmarks/peers/page.py                    # this page
```

`--quick` runs everything once, small, in a few minutes; `--peers`, `--formats` and `--workloads` choose.

## What is asked

Random prompts of token ids, greedy answers of exactly the length asked for (the end-of-sequence token is ignored),
streamed from `/v1/completions`, by `octavo bench serve` ([benchmarking.md](benchmarking.md) defines its figures).
Client and server share the cores. "Clients" each ask again once they have their answer. Every workload of every round
has prompts of its own, the same for all; before each, one request like those to come is sent and not counted, so that a
shared prefix is cached when the clock starts.
"""

_FAIRNESS = """
Who is measured, and how:

- **One server at a time is awake.** All are started once; those whose turn it is not are stopped with SIGSTOP and take
  memory alone. Starting them anew for each case would spend the time on starts (vLLM compiles for minutes).
- **In turns.** A round runs a workload on all of them, one soon after the other, then the next workload; every other
  round in reverse. Ratios are taken within rounds; the table has their geometric mean and Student's t interval.
- **Defaults**, except where they would harm a peer here. octavo: none changed. llama-server is started for each
  workload with as many slots as there are streams, each with the room that its longest sequence needs. vLLM: 2 GB of
  KV cache, 64 sequences. OpenVINO GenAI has no server: a driver steps its continuous batching in process, without
  HTTP, which favours it. `transformers serve` takes text alone, so that its prompts are of random words; it runs
  without `--continuous-batching`, under which it did not answer a first short request within a minute on a CPU.
- **The same weights**: a GGUF file for octavo, llama.cpp and OpenVINO; its dequantised values in bfloat16 as
  safetensors for vLLM and transformers, and as GGUF for octavo beside them. Q4_0, llama.cpp's fastest format, is made
  from those with `llama-quantize --pure`. The 1.1B model has random weights, other ones in each format.
- **A failed request** counts nothing toward throughput and is counted as failed: an answer that broke off, came short,
  or took over five minutes.
"""

_BOUNDS = """
## What bounds each number

- **One stream**: every weight is read once per token, at the speed of the last-level cache where the weights fit into
  it and of memory where they do not. Python's constant per step shows with small models only.
- **8 to 64 streams**: each weight that is read serves all streams, so that arithmetic takes over: products of
  four-bit weights, which have to be unpacked, with activations. At 32 and more the KV cache, read once per stream and
  token, no longer fits the caches.
- **Prefill**: arithmetic alone; from a few thousand tokens attention, which grows with the square, takes over.
- **Over HTTP** the client, JSON and the event loop run on the same cores as the kernels. What that costs is the
  difference between the rows over HTTP and those without; it is large for a small model with many streams on few cores.
- **P99 ITL amid long prompts**: the longest step while somebody decodes. octavo cuts prefill so that steps meet
  `--target-itl-ms`; the long prompt's own TTFT pays for it.
"""


def page(runs: Sequence[tuple[str, Results]]) -> str:
    """docs/benchmarks.md."""
    parts = [_INTRO, _workloads(), _FAIRNESS]
    for name, results in runs:
        parts.extend(_run(name, results))
    if not runs:
        parts.append("\nNo run is stored yet.\n")
    parts.append(_BOUNDS)
    parts.extend(_shares(results) for _, results in runs)
    parts.append("\n## Where octavo loses\n")
    parts.extend(_losses(results) for _, results in runs)
    return "\n".join(part.strip("\n") + "\n" for part in parts if part)


def _workloads() -> str:
    lines = ["| workload | clients | requests | prompt | output | beside them |", "|---|---:|---:|---:|---:|---|"]
    for w in WORKLOADS:
        prompt = f"{w.shared_prefix:,} shared + {w.prompt_tokens}" if w.shared_prefix else f"{w.prompt_tokens:,}"
        beside = f"{w.long_prompts} prompts of {w.long_tokens:,}, every {w.long_every_s:g} s" if w.long_prompts else ""
        requests = w.requests or "until those are answered"
        lines.append(f"| {w.name} | {w.concurrency} | {requests} | {prompt} | {w.output_tokens} | {beside} |")
    return "\n".join(lines)


def _run(name: str, results: Results) -> Iterator[str]:
    facts, host = results.facts, results.facts["host"]
    rounds = len({case.round for case in results.cases})
    yield f"## {facts['model']}"
    if facts["is_quick"]:
        yield "**A smoke run, small and once: it shows that everything runs, and nothing about speed.**"
    revision = (host["revision"] or "unknown").replace("+changes", " with changes")
    yield (
        f"{host['cpu']}, {facts['threads']} threads, {host['total_bytes'] / 2**30:.0f} GiB, {host['system']}; "
        f"{host['time']}; octavo {revision[:12]}{revision[40:]}, "
        f"{', '.join(f'{peer} {version}' for peer, version in facts['peers'].items())}. "
        f"{rounds} round{'s' if rounds != 1 else ''} in a budget of {facts['budget_minutes']:g} minutes, load average "
        f"{host['load_1min'] or 0.0:.1f} at the start. "
        f"Samples: [{name}.json](../{STORED.as_posix()}/{name}.json). Command:"
    )
    yield f"```sh\n{host['command']}\n```"
    yield ABOUT
    for table in ratio_tables(results):
        if table.rows:
            group = table.title.rpartition(", ")[2]
            yield f"### {table.title}"
            yield table.markdown()
            yield f"![ratios, {group}]({_plot_name(name, group)})"
    for table in [*figure_tables(results), start_table(results)]:
        if table.rows:
            yield f"### {table.title[0].upper()}{table.title[1:]}"
            yield table.markdown()
    if results.facts.get("starts"):
        yield (
            "Memory is that of the process after a workload. octavo keeps the KV of finished prompts until the room is "
            "needed, up to `--kv-cache-memory`: by default half of the memory that the weights leave."
        )
    if failed := failure_lines(results):
        yield "Failed requests:"
        yield "\n".join(f"- {line}" for line in failed)
    if notes := note_lines(results):
        yield "Asked otherwise than the rest:"
        yield "\n".join(f"- {line}" for line in notes)


def _shares(results: Results) -> str:
    """How much of its own roofline octavo reaches, from the cases without HTTP."""
    found: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for case in results.cases:
        for figure, bound in case.bounds.items():
            found.setdefault((case.contender, figure), []).append(bound)
    if not found:
        return ""
    lines = [
        f"octavo's share of its own bound (`octavo/cli/bound.py`), {results.facts['model']}, medians over rounds:\n",
        "| | case | share | limited by |",
        "|---|---|---:|---|",
    ]
    labels = {figure.name: figure.label for _, figure in figures_of(results)}
    for (contender, figure), bounds in found.items():
        share, limit = sorted(bounds)[len(bounds) // 2]
        lines.append(f"| {contender} | {labels[figure]} | {share:.0%} | {limit} |")
    return "\n".join(lines)


def _losses(results: Results) -> str:
    """Every ratio that is below 1, or whose interval reaches below it."""
    lines = []
    for pair in results.pairs:
        row = ""
        for task, figure in figures_of(results):
            row = figure.label if not figure.label.startswith(" ") else f"{row.partition(':')[0]}:{figure.label[1:]}"
            ratio = results.ratio(pair, task.name, figure)
            if ratio is not None and (ratio.value < 1 or (ratio.low is not None and ratio.low < 1)):
                slower = "slower" if ratio.value < 1 else "not surely faster"
                why = _WHY.get((task.name, figure.name), "")
                lines.append(f"- {heading(pair)}, {pair.group}: {row}: {shown(ratio)}, {slower}. {why}".rstrip())
    head = f"{results.facts['model']}:\n"
    return "\n".join([head, *lines]) if lines else f"{results.facts['model']}: nowhere in these workloads."


#: Why octavo is the slower one where it is, by task and figure.
_WHY = {
    ("8 chats amid 4000", "long_ttft_mean_s"): (
        "The chats' inter-token latency is what octavo keeps to its target, and the long prompt waits for it."
    ),
}


def _plot_name(name: str, group: str) -> str:
    return f"{name}-{group.replace(' ', '-')}.svg"


def plots(runs: Sequence[tuple[str, Results]]) -> dict[str, str]:
    """File name in docs/ -> SVG."""
    return {
        _plot_name(name, group): ratio_plot(results, group)
        for name, results in runs
        for group in dict.fromkeys(pair.group for pair in results.pairs)
    }


def readme_part(runs: Sequence[tuple[str, Results]]) -> str:
    """What stands between the marks: the first run's ratios of the fastest formats, and its plot."""
    if not runs:
        return ""
    name, results = runs[0]
    tables = {table.title: table for table in ratio_tables(results) if table.rows}
    if not tables:
        return ""
    title, table = list(tables.items())[-1]
    group = title.rpartition(", ")[2]
    smoke = "**A smoke run, not a measurement.** " if results.facts["is_quick"] else ""
    return "\n\n".join(
        [
            f"{smoke}{results.facts['model']}, {group}, {results.facts['host']['cpu']}, {results.facts['threads']} "
            f"threads, {results.facts['host']['time'][:10]}. {ABOUT} All runs, and where octavo loses: "
            "[docs/benchmarks.md](docs/benchmarks.md).",
            table.markdown(),
            f"![ratios](docs/{_plot_name(name, group)})",
        ]
    )


def with_part(text: str, part: str) -> str:
    """``text`` with what stands between the marks replaced; as it is if it has no marks."""
    begin, end = MARKS
    if begin not in text or end not in text:
        return text
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n\n{part}\n\n{end}{rest.partition(end)[2]}"


def stored_runs(root: Path) -> list[tuple[str, Results]]:
    """The runs in ``benchmarks/results``, smoke runs only where there is no other of that model; the 135M first."""
    found = {path.stem: load(path) for path in sorted((root / STORED).glob("peers-*.json"))}
    kept = {name: results for name, results in found.items() if not (results.facts["is_quick"] and name[:-6] in found)}
    return sorted(kept.items(), key=lambda item: ("135m" not in item[0], item[0]))


def files(root: Path) -> dict[Path, str]:
    """Everything that is generated: path -> text."""
    runs = stored_runs(root)
    made = {root / PAGE: page(runs)}
    made |= {root / PAGE.parent / name: text for name, text in plots(runs).items()}
    readme = (root / README).read_text(encoding="utf-8")
    made[root / README] = with_part(readme, readme_part(runs))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if something would change")
    args = parser.parse_args()
    status = 0
    for path, text in files(ROOT).items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        status = int(args.check)
        print(f"{path.relative_to(ROOT)} {'is not what the stored runs say' if args.check else 'written'}")
        if not args.check:
            path.write_text(text, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
