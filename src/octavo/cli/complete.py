"""``octavo complete``: one prompt in, its continuation out, as it is made."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from octavo.cli.console import write_text
from octavo.cli.flags import with_config
from octavo.cli.sampling import MaxTokens, MinP, Seed, Stop, Temperature, TopK, TopP, sampling_params
from octavo.core.config import EngineConfig


@with_config(model="option")
def complete(
    engine: EngineConfig,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue; - reads it from standard input.")],
    max_tokens: MaxTokens = None,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Stop = None,
) -> None:
    """Continue a text, without a server. Only the continuation goes to standard output."""
    sampling = sampling_params(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, stop=stop
    )
    text = sys.stdin.read() if prompt == "-" else prompt

    from octavo.cli.offline import interruptible, stream
    from octavo.engine.load import load_engine

    loaded = load_engine(engine)
    try:
        prompt_token_ids = loaded.tokenizer.encode(text, parse_special=True)
        with interruptible() as interrupted:
            for output in stream(loaded, prompt_token_ids, sampling, interrupted):
                write_text(output.text)
        if sys.stdout.isatty():
            write_text("\n")
        if interrupted.is_set():
            raise typer.Exit(130)
    finally:
        loaded.close()
