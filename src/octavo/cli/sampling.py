"""Flags of commands that generate."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from octavo.core.errors import InvalidRequest
from octavo.core.sampling_params import SamplingParams

MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", "-n", metavar="N", help="Tokens at most. [default: what the context has left]"),
]
Temperature = Annotated[float, typer.Option(metavar="X", help="0 takes the likeliest token; higher is more varied.")]
TopP = Annotated[float, typer.Option(metavar="X", help="Draw from the likeliest tokens that make up this share.")]
TopK = Annotated[int, typer.Option(metavar="N", help="Draw from this many of the likeliest tokens; 0: all.")]
MinP = Annotated[float, typer.Option(metavar="X", help="Drop tokens less likely than this share of the likeliest.")]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Same seed, same tokens; -1: a new one. [default: -1]")]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="End where this text would come; may be given more than once.")
]


def sampling_params(*, stop: list[str] | None = None, **values: Any) -> SamplingParams:
    """SamplingParams from flags; what they do not allow is a usage error."""
    try:
        return SamplingParams(stop=tuple(stop or ()), **values)
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from error
