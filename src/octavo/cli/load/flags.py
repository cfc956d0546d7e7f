"""The flags of ``octavo bench serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

# the server
Url = Annotated[str, typer.Option(metavar="URL", help="The server; /v1 is added where no version stands.")]
Model = Annotated[str | None, typer.Option(metavar="NAME", help="[default: the first that the server lists]")]
ApiKey = Annotated[
    str | None,
    typer.Option(metavar="KEY", envvar="OCTAVO_BENCH_API_KEY", help="Sent as a bearer token; never written down."),
]
Endpoint = Annotated[Literal["completions", "chat"], typer.Option(help="Asked with stream: true.")]
ExtraBody = Annotated[
    str, typer.Option(metavar="JSON", help="An object of fields for every request; null leaves one out.")
]
Timeout = Annotated[float, typer.Option(metavar="S", min=0.01, help="Until a request counts as failed.")]
# what is asked
NumRequests = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Requests in all. [default: 3 x concurrency, at least 32; a trace whole]"),
]
Prompts = Annotated[
    Literal["auto", "ids", "text"], typer.Option(help="Random token ids or random words; auto: ids where taken.")
]
IdRange = Annotated[str, typer.Option(metavar="N:N", help="Random token ids are from here.")]
PromptTokens = Annotated[str, typer.Option(metavar="N or N:N", help="Length of prompts, or a range.")]
OutputTokens = Annotated[str, typer.Option(metavar="N or N:N", help="Length of answers, or a range.")]
IgnoreEos = Annotated[bool, typer.Option(help="Ask for answers of exactly that length; a shorter one has failed.")]
SharedPrefix = Annotated[
    int, typer.Option(metavar="N", min=0, help="Tokens that requests share, before their own; a chat's system message.")
]
PrefixGroups = Annotated[int, typer.Option(metavar="N", min=1, help="Different shared prefixes, taken in turn.")]
Trace = Annotated[
    Path | None, typer.Option(metavar="FILE", dir_okay=False, help="JSONL of requests with their arrival times.")
]
Schema = Annotated[
    str | None, typer.Option(metavar="FILE", help="JSON schema for response_format; 'example' is one of ours.")
]
Tools = Annotated[
    str | None, typer.Option(metavar="FILE", help="JSON list of tools, one to be used; 'example' is ours.")
]
Temperature = Annotated[float, typer.Option(metavar="X", min=0, help="Of every request.")]
TokenIds = Annotated[bool, typer.Option(help="Ask for return_token_ids: how many tokens each event holds.")]
Seed = Annotated[int, typer.Option(metavar="N", help="Of prompts, lengths and arrivals.")]
# when
Concurrency = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, max=4096, help="Clients that each ask again once answered. [default: 8]"),
]
Rate = Annotated[
    float | None, typer.Option(metavar="X", min=0.001, help="Instead: requests per second, at random (Poisson).")
]
Burstiness = Annotated[
    float, typer.Option(metavar="X", min=0.01, max=1000, help="Gamma shape of the gaps: below 1 bursts, 1 Poisson.")
]
Speed = Annotated[float, typer.Option(metavar="X", min=0.001, help="Of the trace's clock.")]
LongPrompt = Annotated[
    str | None, typer.Option(metavar="N or N:N", help="Prompts of that length arrive amid --concurrency steady chats.")
]
NumLong = Annotated[int, typer.Option(metavar="N", min=1, help="How many of them.")]
LongEvery = Annotated[float, typer.Option(metavar="S", min=0.01, help="Seconds between two of them.")]
Warmup = Annotated[int, typer.Option(metavar="N", min=0, help="Requests beforehand, not counted.")]
# what comes out
Goodput = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME:MS", help="What counts as good: 'ttft:500 tpot:50 e2e:9000', any of them."),
]
Json = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", dir_okay=False, writable=True, help="Write every sample and the facts."),
]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE.svg", dir_okay=False, writable=True, help="Draw latencies, and ITL over time."),
]
