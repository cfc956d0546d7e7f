"""A recorded trace: one JSON object per line. ``docs/benchmarking.md`` has the format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from octavo.core.errors import ConfigError

_MAX_TOKENS = 10_000_000
_MAX_SECONDS = 1e7


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEntry:
    """A request of a trace. Exactly one of the first three is given."""

    prompt_tokens: int | None = None  # random ones, after the prefix
    prompt: str | tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    arrival_s: float
    output_tokens: int
    prefix_group: str | None = None  # requests of one group begin alike
    prefix_tokens: int = 0  # so far
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the request's body


_KEYS = frozenset(TraceEntry.__dataclass_fields__)


def read_trace(path: Path, endpoint: Literal["completions", "chat"]) -> list[TraceEntry]:
    """In the order of arrival; blank lines are passed over. ConfigError names the line at fault."""
    entries = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        entries.append(_entry(json.loads(line)))
                        _check_endpoint(entries[-1], endpoint)
                    except json.JSONDecodeError as error:
                        raise ConfigError(f"{path}, line {number}: not JSON ({error.msg})") from error
                    except ValueError as error:
                        raise ConfigError(f"{path}, line {number}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read the trace {path}: {reason}") from error
    if not entries:
        raise ConfigError(f"the trace {path} is empty; it needs one JSON object per line")
    return sorted(entries, key=lambda entry: entry.arrival_s)


def _check_endpoint(entry: TraceEntry, endpoint: str) -> None:
    if entry.messages is not None and endpoint != "chat":
        raise ValueError("messages go with --endpoint chat")
    if isinstance(entry.prompt, tuple) and endpoint != "completions":
        raise ValueError("a prompt of token ids goes with --endpoint completions")


def _entry(line: Any) -> TraceEntry:
    """Raises ValueError."""
    if not isinstance(line, dict):
        raise ValueError(f"{json.dumps(line)[:60]} is no object")
    if unknown := sorted(line.keys() - _KEYS):
        raise ValueError(f"unknown key {unknown[0]!r}; the keys are {', '.join(sorted(_KEYS))}")
    prompts = [name for name in ("prompt_tokens", "prompt", "messages") if line.get(name) is not None]
    if len(prompts) != 1:
        raise ValueError(f"needs one of prompt_tokens, prompt and messages, not {' and '.join(prompts) or 'none'}")
    group, fields = line.get("prefix_group"), line.get("fields", {})
    if group is not None and not isinstance(group, str):
        raise ValueError(f"prefix_group is {json.dumps(group)[:60]} but must be a string")
    if not isinstance(fields, dict):
        raise ValueError(f"fields is {json.dumps(fields)[:60]} but must be an object")
    prefix_tokens = _number(line, "prefix_tokens", 0, _MAX_TOKENS, 0)
    if (group is None) != (prefix_tokens == 0):
        raise ValueError("prefix_group and prefix_tokens belong together")
    if group is not None and prompts != ["prompt_tokens"]:
        raise ValueError(f"prefix_group goes with prompt_tokens, not with {prompts[0]}")
    arrival_s = line.get("arrival_s")
    if not isinstance(arrival_s, int | float) or isinstance(arrival_s, bool) or not 0 <= arrival_s <= _MAX_SECONDS:
        raise ValueError(f"arrival_s is {json.dumps(arrival_s)[:60]} but must be a number of seconds from 0 up")
    return TraceEntry(
        prompt_tokens=_number(line, "prompt_tokens", 1, _MAX_TOKENS, None),
        prompt=_prompt(line.get("prompt")),
        messages=_messages(line.get("messages")),
        arrival_s=float(arrival_s),
        output_tokens=_number(line, "output_tokens", 1, _MAX_TOKENS),
        prefix_group=group,
        prefix_tokens=prefix_tokens,
        fields=fields,
    )


_REQUIRED: Any = object()


def _number(line: Mapping[str, Any], name: str, low: int, high: int, default: Any = _REQUIRED) -> Any:
    value = line.get(name)
    if value is None and default is not _REQUIRED:
        return default
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} is {json.dumps(value)[:60]} but must be a whole number from {low} to {high}")
    return value


def _prompt(value: Any) -> str | tuple[int, ...] | None:
    if value is None or (isinstance(value, str) and value):
        return value
    if isinstance(value, list) and value and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    raise ValueError("prompt must be a text or a list of token ids, not empty")


def _messages(value: Any) -> tuple[Mapping[str, Any], ...] | None:
    if value is None:
        return None
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return tuple(value)
    raise ValueError("messages must be a list of objects, not empty")
