"""The ``octavo`` command.

What a command needs is imported inside it, so ``octavo --help`` loads neither numpy, torch, fastapi nor rich.
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Annotated

import typer

from octavo._version import __version__
from octavo.cli import bench, chat, complete, convert, doctor, models, serve
from octavo.core.errors import OctavoError

logger = logging.getLogger("octavo")

# rich_markup_mode: plain help lets flags keep their names at 80 columns, and keeps an error on one line.
app = typer.Typer(name="octavo", pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)
app.command()(serve.serve)
app.command()(chat.chat)
app.command()(complete.complete)
app.command()(models.pull)
app.command(name="models")(models.list_all)
app.command()(models.rm)
app.command()(convert.convert)
app.command()(doctor.doctor)
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"octavo {__version__}")
        raise typer.Exit()


@app.callback()
def octavo(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Run open-weight language models: chat in the terminal, or serve them over an OpenAI-compatible API."""
    if debug:
        logger.setLevel(logging.DEBUG)


@app.command()
def version() -> None:
    """Print the version."""
    _print_version(True)


def main() -> None:
    """Run the command line. Exit codes: 0 well, 1 octavo could not do it, 2 wrong usage, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a model's text must not crash a terminal that is not UTF-8
    try:
        app()
    except OctavoError as error:
        if logger.isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        print(f"octavo: {error}", file=sys.stderr)
        sys.exit(1)
