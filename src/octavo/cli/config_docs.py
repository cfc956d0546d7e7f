"""Writes docs/configuration.md: ``python -m octavo.cli.config_docs > docs/configuration.md``."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.cli.fields import ConfigField, config_fields
from octavo.cli.flags import SYNONYMS
from octavo.core.config import EngineConfig, ServerConfig

_INTRODUCTION = """\
# Configuration

Every setting is a field of `EngineConfig` or `ServerConfig` (`src/octavo/core/config.py`), and each field is

- a flag of the commands (`octavo serve`, and for the engine also `chat`, `complete`, `bench` and `doctor`),
- a key of the TOML file that `--config FILE` names; a flag beats the file, the file beats the default,
- a keyword of `octavo.LLM(...)` and `octavo.EngineConfig(...)`, for the engine's fields.

*auto* means that octavo decides from the model and the machine; `octavo serve` prints what it decided, and why. A value
out of bounds, an unknown key or a key of the wrong type is an error that names it.

```toml
# octavo.toml
model = "smollm2-135m"
max_num_seqs = 32
kv_cache_memory = "2GiB"          # bytes, or a string with KiB, MiB, GiB, TiB (1024) or kB, MB, GB, TB (1000)
api_key = ["first-key", "second-key"]
```

Keys on the command line can be seen in the list of processes; put them in a file that only you can read.

This page is written by `python -m octavo.cli.config_docs > docs/configuration.md`; a test checks that it is up to date.
"""


def configuration_page() -> str:
    """The whole page."""
    return "".join(
        [
            _INTRODUCTION,
            "\n## Engine\n\n",
            *_table(EngineConfig),
            "\n## Server\n\n",
            *_table(ServerConfig),
        ]
    )


def _table(config: type) -> Iterator[str]:
    yield "| field | flag | takes | default | meaning |\n|---|---|---|---|---|\n"
    for field in config_fields(config):
        cells = (f"`{field.name}`", _flag(field), _takes(field), _code(field.shown_default), field.doc)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _flag(field: ConfigField) -> str:
    if field.name == "model":
        return "argument `MODEL`; `--model` of `complete`"
    flags = [field.flag, *SYNONYMS.get(field.name, ())]
    if field.kind == "switch":
        flags.append(f"--no-{field.flag[2:]}")
    return ", ".join(f"`{flag}`" for flag in flags)


def _takes(field: ConfigField) -> str:
    if field.choices:
        return ", ".join(f"`{choice}`" for choice in field.choices)
    what = {
        "text": "text",
        "whole": "whole number",
        "real": "number",
        "switch": "on or off",
        "size": "size",
        "list": "text, repeatable",
    }[field.kind]
    facts = [what, "" if field.kind == "size" else field.unit, field.bounds]
    return ", ".join(fact for fact in facts if fact)


def _code(default: str) -> str:
    return f"*{default}*" if default in ("auto", "none") else f"`{default}`"


if __name__ == "__main__":
    print(configuration_page(), end="")
