"""Tables for people, as wide as their terminal; for programs, behind a pipe, plain text with every figure whole.

On a terminal columns of figures never break: those that do not fit beside each other go below, under the first column
again. Columns of text fold. Elsewhere there is no width to fit and nothing is drawn: one line per row, columns two or
more spaces apart, no control characters whatever the environment says.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

#: Of a column of text that has to fold.
_LEAST_TEXT_WIDTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells. ``text``: the columns of words, to the left and free to fold; the others are figures."""

    rows: Sequence[Sequence[str]]
    headings: Sequence[str] = ()  # none: two columns, what and its value
    title: str = ""
    text: Collection[int] = (0,)
    styles: Mapping[str, str] = field(default_factory=dict)  # first cell of a row -> rich style of the others


def facts_table(title: str, rows: Sequence[Sequence[str]], *, alarming: Collection[str] = ()) -> Table:
    """What, and its value.

    alarming: names of rows that must not be overlooked
    """
    return Table(title=title, rows=rows, text=(0, 1), styles=dict.fromkeys(alarming, "bold red"))


def show(*tables: Table, out: TextIO | None = None) -> None:
    """Write tables to standard output, or to ``out``, as fits what that is."""
    out = sys.stdout if out is None else out
    for table in tables:
        if out.isatty():
            _draw(table, out)
        else:
            out.writelines(f"{line}\n" for line in plain_lines(table))
    out.flush()


def show_line(mark: str, text: str, *, style: str, out: TextIO | None = None) -> None:
    """A mark in a rich ``style`` and beside it a text, which on a terminal folds in its own column."""
    out = sys.stdout if out is None else out
    if not out.isatty():
        print(f"{mark}  {_one_line(text)}", file=out, flush=True)
        return
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    line = RichTable.grid(padding=(0, 2))
    line.add_column(no_wrap=True)
    line.add_column(overflow="fold")
    line.add_row(Text(mark, style=style), Text(_one_line(text)))
    Console(file=out, highlight=False).print(line)


def plain_lines(table: Table) -> Iterator[str]:
    """The table as plain text: its title, its headings, a line per row."""
    if table.title:
        yield _one_line(table.title)
    rows = [[_one_line(cell) for cell in row] for row in ([table.headings] if table.headings else []) + [*table.rows]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if column in table.text else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _one_line(text: str) -> str:
    """``text`` without line breaks and control characters: a file may have any name."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _draw(table: Table, out: TextIO) -> None:
    # rich takes 80 ms to import, so only what draws asks for it
    from rich.box import ROUNDED
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=out, highlight=False)
    for number, columns in enumerate(_groups(table, console.width)):
        drawn = RichTable(box=ROUNDED, show_header=bool(table.headings), title_justify="left")
        if table.title and number == 0:
            drawn.title = Text(_one_line(table.title), style="bold")
        for column in columns:
            heading = Text(table.headings[column]) if table.headings else ""
            is_text = column in table.text
            drawn.add_column(heading, justify="left" if is_text else "right", overflow="fold", no_wrap=False)
        if not table.headings:
            drawn.columns[0].style, drawn.columns[0].no_wrap = "cyan", True
        for row in table.rows:
            style = table.styles.get(row[0], "")
            drawn.add_row(*(Text(_one_line(row[column]), style=style if column else "") for column in columns))
        console.print(drawn)


def _groups(table: Table, width: int) -> list[list[int]]:
    """Which columns are drawn beside each other. The first begins every group."""
    from rich.cells import cell_len

    rows = ([table.headings] if table.headings else []) + [*table.rows]
    widths = [max(map(cell_len, map(_one_line, column))) for column in zip(*rows, strict=True)]
    least = [
        min(size, _LEAST_TEXT_WIDTH) if column in table.text and column else size for column, size in enumerate(widths)
    ]
    groups = [[0]]
    for column in range(1, len(least)):
        together = [*groups[-1], column]
        if len(together) > 2 and 1 + sum(least[c] + 3 for c in together) > width:
            groups.append([0])
        groups[-1].append(column)
    return groups
