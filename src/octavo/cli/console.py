"""How the command line speaks: output on standard output, remarks on standard error, units that people read."""

from __future__ import annotations

import re
import sys

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


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
