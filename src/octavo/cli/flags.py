"""Flags made from the config dataclasses: a new field is a new flag, a key of the file and a line of the docs."""

from __future__ import annotations

import difflib
import functools
import inspect
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from octavo.cli.fields import ConfigField, config_fields, parse_size
from octavo.core.config import EngineConfig, ServerConfig
from octavo.core.errors import ConfigError

CONFIGS: tuple[type, ...] = (EngineConfig, ServerConfig)

#: Further spellings of a flag: what vLLM calls the same thing.
SYNONYMS = {
    "policy": ("--scheduling-policy",),
    "kv_cache_memory": ("--kv-cache-memory-bytes",),
}

_TYPES: dict[str, Any] = {"text": str, "whole": int, "real": float, "switch": bool, "size": int, "list": list[str]}
_METAVARS = {"text": "TEXT", "whole": "N", "real": "X", "size": "SIZE", "list": "TEXT"}
_Command = Callable[..., None]


def with_config(
    *, model: Literal["argument", "option"] = "argument", omit: Collection[str] = ()
) -> Callable[[_Command], _Command]:
    """Let a command take whole configs: a parameter annotated with a config class becomes one flag for each field.

    The decorated command also gets ``--config FILE``. A flag beats the file, the file beats the default. ``model`` says
    whether the model is the positional argument or ``--model``. omit: fields that the command decides itself: no flag,
    and a config file's value does not reach it.
    """

    def decorate(command: _Command) -> _Command:
        hints = get_type_hints(command, include_extras=True)
        configs = {name: hint for name, hint in hints.items() if hint in CONFIGS}

        @functools.wraps(command)
        def run(*, config: Path | None, **given: Any) -> None:
            wishes = read_config_file(config) if config is not None else {}
            for cls in configs.values():
                for field in config_fields(cls):
                    value = given.pop(field.name, None)
                    if field.name in omit:
                        wishes.pop(field.name, None)
                    elif value is not None:  # typed by the user
                        wishes[field.name] = tuple(value) if field.kind == "list" else value
            command(**given, **{name: _build(cls, wishes) for name, cls in configs.items()})

        # typer reads a function's signature and nothing else; it must not follow __wrapped__ to the bare command.
        del run.__wrapped__
        run.__annotations__ = {}
        run.__signature__ = inspect.Signature(list(_parameters(command, hints, configs, model, omit)))  # type: ignore[attr-defined]
        return run

    return decorate


def read_config_file(path: Path) -> dict[str, Any]:
    """Field name -> value of a TOML file. ConfigError for an unknown key, a wrong type or a value out of bounds.

    One file may serve all commands: the keys of every config are known, and a command takes those that concern it.
    """
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    known = {field.name: (cls, field) for cls in CONFIGS for field in config_fields(cls)}
    wishes = {}
    for key, value in table.items():
        if key not in known:
            close = difflib.get_close_matches(key.replace("-", "_"), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the keys are {', '.join(known)}"
            raise ConfigError(f"{path}: unknown key {key!r}; {hint}")
        cls, field = known[key]
        try:
            wishes[key] = field.from_file(value)
            cls(**{key: wishes[key]})  # its bounds and choices
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
    return wishes


def _build(cls: type, wishes: Mapping[str, Any]) -> Any:
    """``cls`` from those wishes that are its fields; the others belong to another config."""
    names = {field.name for field in config_fields(cls)}
    return cls(**{name: value for name, value in wishes.items() if name in names})


def _parameters(
    command: _Command, hints: Mapping[str, Any], configs: Mapping[str, type], model: str, omit: Collection[str]
) -> Iterable[inspect.Parameter]:
    """The command's own parameters, then --config, then one flag for each field."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    for name, own in inspect.signature(command).parameters.items():
        if name not in configs:
            yield own.replace(annotation=hints[name], kind=keyword)
    file_option = typer.Option(metavar="FILE", help="TOML file whose keys are the fields below; a flag beats the file.")
    yield inspect.Parameter("config", keyword, default=None, annotation=Annotated[Path | None, file_option])
    for cls in configs.values():
        for field in config_fields(cls):
            if field.name in omit:
                continue
            option = _option(cls, field, positional=field.name == "model" and model == "argument")
            kind = Literal[field.choices] if field.kind == "choice" else _TYPES[field.kind]
            yield inspect.Parameter(field.name, keyword, default=None, annotation=Annotated[kind | None, option])


def _option(cls: type, field: ConfigField, *, positional: bool) -> Any:
    def check(value: Any) -> Any:
        """Bounds are the config's own; on the command line they are a usage error that names the flag."""
        try:
            if value is not None and field.kind != "list":
                cls(**{field.name: value})
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from error
        return value

    if positional:
        return typer.Argument(metavar="MODEL", help=_help(field), show_default=False)
    flag = f"{field.flag}/--no-{field.flag[2:]}" if field.kind == "switch" else field.flag
    return typer.Option(
        flag,
        *SYNONYMS.get(field.name, ()),
        help=_help(field),
        show_default=False,
        callback=check,
        parser=_size_on_command_line if field.kind == "size" else None,
        metavar="NAME" if _has_many_choices(field) else _METAVARS.get(field.kind),
    )


def _has_many_choices(field: ConfigField) -> bool:
    """More than a line of the help holds unbroken."""
    return len("|".join(field.choices)) > 60


def _help(field: ConfigField) -> str:
    choices = f"one of {', '.join(field.choices)}" if _has_many_choices(field) else ""
    facts = [choices, field.unit, field.bounds, f"default: {field.shown_default}"]
    return f"{field.doc} [{'; '.join(fact for fact in facts if fact)}]"


def _size_on_command_line(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
