"""``octavo convert``: a model as one GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from octavo.cli.console import human_bytes, remark
from octavo.core.config import QuantizeFormat
from octavo.core.errors import ConfigError


def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Alias, hub id, folder or path of a .gguf file.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The GGUF file to write.")],
    quantize: Annotated[
        str | None, typer.Option(metavar="FORMAT", help=f"Pack wide matrices: {', '.join(get_args(QuantizeFormat))}.")
    ] = None,
    vocabulary: Annotated[
        Path | None, typer.Option(metavar="FILE", help="For safetensors: a GGUF file with the model's tokenizer.")
    ] = None,
) -> None:
    """Write a model as one GGUF file that octavo and llama.cpp read."""
    from octavo.hub.resolve import resolve_model
    from octavo.model.convert import convert as write

    if quantize is not None and quantize not in get_args(QuantizeFormat):
        raise ConfigError(f"--quantize is {quantize!r} but must be one of {', '.join(get_args(QuantizeFormat))}")
    found = resolve_model(model, progress=True)
    size = write(found.path, out, quantize, vocabulary)  # type: ignore[arg-type]
    remark(f"{out}: {human_bytes(size)}")
