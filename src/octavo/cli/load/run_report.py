"""What is said about a run: plain text that fits its width by leaving columns out, never by cutting them."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.cli.distributions import distribution
from octavo.cli.load.measures import Target, failures, interference, latencies, totals
from octavo.cli.load.runner import ClientCost, Run
from octavo.cli.load.sample import Sample
from octavo.cli.tables import Table, plain_lines

#: Statistics of a latency, those to keep longest first.
_COLUMNS = ("p50", "p99", "mean", "p95", "p90", "max", "count")
_ORDER = ("mean", "p50", "p90", "p95", "p99", "max", "count")
_HEADINGS = {"count": "samples", **{name: name.upper() for name in ("p50", "p90", "p95", "p99")}}
#: A loop this late, or this share of a core, and the client may be what was measured.
_LATE_S, _BUSY = 0.005, 0.8
_SENT_LATE_S = 0.05
#: A share of prompt tokens from a cache that needs a word: templates and first tokens are alike by nature.
_CACHED = 0.3


def width() -> int:
    """Of the terminal; 80 for what is no terminal."""
    return shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else 80


def latency_table(rows: Sequence[tuple[str, Mapping[str, float] | None]], columns: int) -> str:
    """One row per latency, in milliseconds, with as many statistics as fit."""
    for dropped in range(len(_COLUMNS)):
        kept = set(_COLUMNS[: len(_COLUMNS) - dropped])
        names = [name for name in _ORDER if name in kept]
        table = Table(
            headings=["ms", *(_HEADINGS.get(name, name) for name in names)],
            rows=[(label, *(_cell(found, name) for name in names)) for label, found in rows],
        )
        lines = list(plain_lines(table))
        if max(map(len, lines)) <= columns:
            break
    return "\n".join(lines)


def _cell(found: Mapping[str, float] | None, name: str) -> str:
    if found is None:
        return "0" if name == "count" else "-"
    return f"{found[name]:,.0f}" if name == "count" else f"{found[name] * 1e3:,.1f}"


def report(run: Run, target: Target, notes: Sequence[str], columns: int, *, shares_prompts: bool = True) -> str:
    """All that is said about a run. ``shares_prompts``: whether prompts from a server's cache are to be expected."""
    found = totals(run.samples, run.duration_s, target)
    parts = [_facts(run, found, target, columns)]
    if found["answered"]:
        parts.insert(0, latency_table(_latency_rows(run.samples), columns))
    if failed := failures(run.samples):
        lines = [f"{count} x {_failure(kind, status, message)}" for kind, status, message, count in failed[:8]]
        if len(failed) > 8:
            lines.append(f"and {sum(count for *_, count in failed[8:])} more of {len(failed) - 8} kinds")
        parts.append("failed:\n" + "\n".join(wrapped(line, columns, "    ", "  ") for line in lines))
    told = [*notes, *remarks(run.samples, found, run)]
    if not shares_prompts and (found["cached_tokens"] or 0) > _CACHED * (found["prompt_tokens"] or 0):
        told.append(
            "prompts came from the server's cache, although no two are alike: it has met this seed before; "
            "take another --seed, or restart it"
        )
    if told:
        parts.append("\n".join(wrapped(f"note: {note}", columns) for note in told))
    return "\n\n".join(parts)


def _failure(kind: str, status: int | None, message: str) -> str:
    return ": ".join(part for part in (f"status {status}" if kind == "status" else kind, message) if part)


def _latency_rows(samples: Sequence[Sample]) -> list[tuple[str, Mapping[str, float] | None]]:
    rows: list[tuple[str, Mapping[str, float] | None]] = []
    groups = list(dict.fromkeys(sample.group for sample in samples)) or [""]
    for group in sorted(groups):
        found = latencies(sample for sample in samples if sample.group == group)
        before = f"{group} " if group else ""
        names = ("ttft", "e2e") if group == "long" else ("ttft", "tpot", "itl", "e2e")
        apart = interference(samples) if group == "chat" else {}
        for name in names:
            rows.append((f"{before}{name.upper()}", found[f"{name}_s"]))
            if f"{name}_alone_s" in apart:
                rows.append(("  no long prompt", apart[f"{name}_alone_s"]))
                rows.append(("  amid a long one", apart[f"{name}_during_s"]))
    return rows


def _facts(run: Run, found: Mapping[str, Any], target: Target, columns: int) -> str:
    lines = [
        (
            "requests",
            f"{found['answered']} of {found['requests']} answered in {found['duration_s']:.2f} s, "
            f"{found['requests_per_s']:.2f}/s",
        ),
        ("output", f"{found['output_tokens']:,} tokens, {found['output_tokens_per_s']:,.1f}/s"),
    ]
    if found["prompt_tokens"] is not None and found["answered"]:
        cached = found["cached_tokens"]
        lines.append(
            (
                "prompts",
                f"{found['prompt_tokens']:,} tokens, {found['prompt_tokens'] / found['answered']:,.1f} each"
                + ("" if cached is None else f", {cached:,} from a cache")
                + f"; with the output {found['total_tokens_per_s']:,.1f}/s",
            )
        )
    if target.limits_s:
        lines.append(
            (
                "goodput",
                f"{found['goodput_requests']} of {found['requests']} within {target} ms, "
                f"{found['goodput_requests_per_s']:.2f}/s",
            )
        )
    if found["checked_json"]:
        cut = f"; {found['cut_json']} were cut by their length" if found["cut_json"] else ""
        share = f"{found['valid_json']} of {found['checked_json']}"
        lines.append(("in form", f"{share} answers are the JSON asked for{cut}"))
    lines.append(("client", client_line(run.cost, run.duration_s)))
    return "\n".join(wrapped(f"{name:9} {text}", columns, " " * 10) for name, text in lines)


def client_line(cost: ClientCost, duration_s: float) -> str:
    """What the measuring itself took."""
    share = cost.cpu_s / duration_s if duration_s > 0 else 0.0
    lag = distribution(cost.lag_s)
    late = "" if lag is None else f"; its loop late by {lag['p99'] * 1e3:.1f} ms (P99), {lag['max'] * 1e3:.1f} (max)"
    return f"{cost.cpu_s:.2f} s of CPU, {share * 100:.0f} % of a core{late}"


def remarks(samples: Sequence[Sample], found: Mapping[str, Any], run: Run) -> list[str]:
    """What a reader must know before believing the figures."""
    told = []
    if found["interrupted"]:
        told.append(f"stopped by Ctrl-C; {found['interrupted']} requests in flight are not counted")
    if found["requests"] and not found["answered"]:
        told.append("no request was answered: there is nothing to measure")
    if by := {name: count for name, count in found["counted_by"].items() if name != "usage"}:
        how = " and ".join(f"by {name} in {count}" for name, count in by.items())
        told.append(f"the server sent no usage: output tokens are counted {how} answers")
    per_event = found["tokens_per_event"]
    if per_event is not None and per_event > 1.05:
        told.append(
            f"the server sends {per_event:.2f} tokens per event: its ITL is of events, which are fewer and further "
            "apart than tokens; compare TPOT"
        )
    events = sum(len(sample.event_times_s) for sample in samples if sample.failure is None)
    if events and found["arrivals_of_output"] < 0.95 * events:
        joined = 1 - found["arrivals_of_output"] / events
        told.append(f"{joined * 100:.0f} % of events came in one read with the one before and give no gap of their own")
    if found["shorter_than_asked"]:
        told.append(f"{found['shorter_than_asked']} answers are shorter than asked: the model ended them")
    lag = distribution(run.cost.lag_s)
    if lag is not None and found["answered"] and (lag["p99"] > _LATE_S or run.cost.cpu_s > _BUSY * run.duration_s):
        told.append(
            "the client itself was late or busy (see client), and latencies may include that; give it a core of its "
            "own, or fewer requests"
        )
    late_s = max((s.sent_s - s.arrival_s for s in samples if s.sent_s is not None), default=0.0)
    if late_s > _SENT_LATE_S:
        told.append(f"requests went out up to {late_s * 1e3:.0f} ms after they were due; that counts as latency")
    return told


def wrapped(text: str, columns: int, later: str = "  ", first: str = "") -> str:
    """Folded at spaces; a word longer than a line is broken."""
    return textwrap.fill(text, columns, initial_indent=first, subsequent_indent=later)
