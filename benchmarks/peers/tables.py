"""The tables of a run: ratios first, then what they are ratios of, failures, and starts."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from contenders import Contender, Pair, contenders_of
from in_process import Bench
from ratios import Ratio
from results import Results
from workloads import Figure, Workload

from octavo.cli.tables import Table as PlainTable
from octavo.cli.tables import plain_lines

ABOUT = (
    "Ratios say how many times as fast octavo is: above 1, octavo is faster, also where less is better (ITL, TTFT). "
    "In brackets the 95 % interval over rounds; without one, it ran once. ! marks failed requests."
)
_NONE = "-"


@dataclass(frozen=True, slots=True)
class Table:
    """Text cells; the first column names the row."""

    title: str
    headings: list[str]
    rows: list[list[str]]

    def text(self, columns: int) -> str:
        """Plain, in as many parts as the width makes necessary; a part always has at least one column of figures."""
        parts, first = [], 1
        while first < len(self.headings):
            last = first + 1
            while last < len(self.headings) and self._width(first, last + 1) <= columns:
                last += 1
            parts.append("\n".join(self._part(first, last)))
            first = last
        return "\n\n".join([self.title, *parts])

    def markdown(self) -> str:
        """For docs."""
        lines = [self.headings, ["---", *["---:"] * (len(self.headings) - 1)], *self.rows]
        lines = [[line[0].replace("  ", "&nbsp;&nbsp;"), *line[1:]] for line in lines]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def _part(self, first: int, last: int) -> list[str]:
        rows = [[row[0], *row[first:last]] for row in self.rows]
        return list(plain_lines(PlainTable(headings=[self.headings[0], *self.headings[first:last]], rows=rows)))

    def _width(self, first: int, last: int) -> int:
        return max(map(len, self._part(first, last)))


def report(results: Results, columns: int) -> str:
    """Everything a run says, for a terminal or a pipe."""
    tables = [*ratio_tables(results), *figure_tables(results)]
    parts = ["\n".join(textwrap.wrap(ABOUT, columns))] + [made.text(columns) for made in tables]
    starts = start_table(results)
    if starts.rows:
        parts.append(starts.text(columns))
    if failed := failure_lines(results):
        parts.append("\n".join(["! failed", *(_wrapped(line, columns) for line in failed)]))
    if notes := note_lines(results):
        parts.append("\n".join(["Not the same for", *(_wrapped(line, columns) for line in notes)]))
    return "\n\n".join(parts)


def ratio_tables(results: Results) -> Iterator[Table]:
    """One per group of pairs."""
    for group in dict.fromkeys(pair.group for pair in results.pairs):
        pairs = [pair for pair in results.pairs if pair.group == group]
        rows = [
            [figure.label, *(_ratio_cell(results, pair, task, figure) for pair in pairs)]
            for task, figure in figures_of(results)
        ]
        headings = [heading(pair) for pair in pairs]
        kept = [row for row in rows if any(cell != _NONE for cell in row[1:])]
        yield Table(f"octavo / peer, {group}", ["", *headings], kept)


def figure_tables(results: Results) -> Iterator[Table]:
    """Medians over rounds, of everybody."""
    contenders = contenders_of(results.pairs)
    rows = [
        [f"{figure.label}, {figure.unit}", *(_median_cell(results, one, task, figure) for one in contenders)]
        for task, figure in figures_of(results)
    ]
    kept = [row for row in rows if any(cell != _NONE for cell in row[1:])]
    yield Table("medians over rounds", ["", *(contender.name for contender in contenders)], kept)


def start_table(results: Results) -> Table:
    """Time from starting a server to its first answer, of its first start; and the most memory after a workload."""
    rows: dict[str, list[str]] = {}
    for start in results.facts.get("starts", ()):
        memory = start["memory_bytes"]
        shown = f"{memory / 1e9:.2f} GB" if memory else _NONE
        rows.setdefault(start["contender"], [start["contender"], f"{start['ready_s']:.1f} s", shown])
    return Table("starts", ["", "ready after", "most memory"], list(rows.values()))


def failure_lines(results: Results) -> list[str]:
    """Who failed what, how often, and what was said."""
    lines = []
    for contender in contenders_of(results.pairs):
        for task in results.tasks:
            failed, asked = results.failures(contender, task.name)
            if failed:
                lines.append(f"{contender.name}, {task.name}: {failed} of {asked}")
        for message, count in results.messages(contender).most_common(3):
            lines.append(f"{contender.name}: {count} x {message.splitlines()[0]}")
    return lines


def note_lines(results: Results) -> list[str]:
    """What the load client had to leave out or to do otherwise for a server."""
    notes = {
        case.contender: None for case in results.cases if case.notes
    }  # in the order in which they were met, each once
    return [
        f"{name}: {note}"
        for name in notes
        for note in dict.fromkeys(note for case in results.cases if case.contender == name for note in case.notes)
    ]


def figures_of(results: Results) -> Iterator[tuple[Workload | Bench, Figure]]:
    """The rows of a table."""
    for task in results.tasks:
        for figure in task.figures:
            yield task, figure


def heading(pair: Pair) -> str:
    """Of a column: the peer and the format, or both formats where they differ."""
    same = pair.ours.format == pair.theirs.format
    return f"{pair.label} {pair.theirs.format}" if same else f"{pair.ours.format} / {pair.label} {pair.theirs.format}"


def _ratio_cell(results: Results, pair: Pair, task: Workload | Bench, figure: Figure) -> str:
    ratio = results.ratio(pair, task.name, figure)
    failed = any(results.failures(one, task.name)[0] for one in (pair.ours, pair.theirs))
    mark = "!" if failed else ""
    return f"{shown(ratio)}{mark}" if ratio is not None else f"failed{mark}" if failed else _NONE


def shown(ratio: Ratio) -> str:
    """``2.31 (2.12-2.50)``."""
    digits = 2 if ratio.value < 10 else 1 if ratio.value < 100 else 0
    middle = f"{ratio.value:.{digits}f}"
    if ratio.low is None or ratio.high is None:
        return middle
    return f"{middle} ({ratio.low:.{digits}f}-{ratio.high:.{digits}f})"


def _median_cell(results: Results, contender: Contender, task: Workload | Bench, figure: Figure) -> str:
    values: Sequence[float] = list(results.figures(contender, task.name, figure.name).values())
    if not values:
        return _NONE
    value = statistics.median(values) * (1e3 if figure.unit == "ms" else 1)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _wrapped(line: str, columns: int) -> str:
    return "\n".join(textwrap.wrap(line, columns, initial_indent="  ", subsequent_indent="    "))
