"""How the command line speaks: tables on standard output, remarks on standard error, units that people read."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def console(*, stderr: bool = False) -> Console:
    """A rich console. rich takes 80 ms to import, so only who draws asks for one."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=False)


def facts_table(title: str, rows: Iterable[tuple[str, str]], *, alarming: Collection[str] = ()) -> Table:
    """Two columns: what, and its value. Long values fold in their column; text is shown as it is, never as markup.

    alarming: names of rows that must not be overlooked
    """
    from rich.box import ROUNDED
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title, style="bold"), title_justify="left", box=ROUNDED, show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value, style="bold red" if name in alarming else ""))
    return table


def remark(text: str) -> None:
    """One line for the user on standard error: not part of a command's output."""
    print(text, file=sys.stderr, flush=True)


def human_bytes(count: int) -> str:
    """``98362432`` -> ``93.8 MiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def write_text(text: str) -> None:
    """Model output, at once. On a terminal control characters are dropped: a model must not be able to steer it."""
    if sys.stdout.isatty():
        text = _CONTROL.sub("", text)
    sys.stdout.write(text)
    sys.stdout.flush()
