"""``octavo pull``, ``octavo models``, ``octavo rm``: what is in the model cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import human_bytes, remark
from octavo.cli.tables import Table, show

if TYPE_CHECKING:
    from octavo.hub.cache import CachedModel

_NAME = typer.Argument(metavar="MODEL", help="Alias, or hub id (org/name) with :file.gguf behind it if need be.")


def pull(
    name: Annotated[str, _NAME],
    revision: Annotated[str | None, typer.Option(metavar="TEXT", help="Branch, tag or commit of a hub id.")] = None,
) -> None:
    """Fetch a model into the cache. Prints where it is."""
    from octavo.hub.resolve import resolve_model

    print(resolve_model(name, progress=True, revision=revision).path)


def list_all(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the models in the cache."""
    from octavo.hub.cache import cache_root
    from octavo.hub.resolve import ALIASES, list_models

    held = list_models()
    if as_json:
        facts = [{"name": m.name, "bytes": m.num_bytes, "path": str(m.path), "source": m.source} for m in held]
        print(json.dumps(facts, indent=2))
        return
    if not held:
        remark(
            f"no models in {cache_root()} yet; fetch one with 'octavo pull MODEL': {', '.join(ALIASES)}, or a hub id"
        )
        return
    show(models_table(held))


def models_table(held: Sequence[CachedModel]) -> Table:
    """One row per model."""
    rows = [(model.name, human_bytes(model.num_bytes), model.source, str(model.path)) for model in held]
    return Table(headings=("name", "size", "source", "path"), rows=rows, text=(0, 2, 3))


def rm(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="Alias, or a name that 'octavo models' lists.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a model from the cache."""
    from octavo.hub.resolve import held_model, remove_model

    model = held_model(name)
    if not yes:
        typer.confirm(f"Delete {model.name} ({human_bytes(model.num_bytes)}) from the cache?", abort=True, err=True)
    print(f"freed {human_bytes(remove_model(name))}")
