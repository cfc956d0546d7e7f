"""What a config field looks like from outside: one description that the flags, the file and the docs table share."""

from __future__ import annotations

import re
import types
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from octavo.core.errors import ConfigError

Kind = Literal["text", "choice", "whole", "real", "switch", "size", "list"]

_UNITS = {"": 0, "b": 0, "kb": 1, "mb": 2, "gb": 3, "tb": 4, "kib": 1, "mib": 2, "gib": 3, "tib": 4}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigField:
    """One field of a config dataclass. ``default`` None means that the engine decides (auto)."""

    name: str
    kind: Kind
    doc: str
    default: Any
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    unit: str = ""

    @property
    def flag(self) -> str:
        """``max_model_len`` -> ``--max-model-len``."""
        return "--" + self.name.replace("_", "-")

    @property
    def shown_default(self) -> str:
        """The default as one would type it; "auto" and "none" where there is nothing to type."""
        if self.kind == "list":
            return "none"
        if self.default is None:
            return "auto" if "auto:" in self.doc else "none"
        if self.kind == "switch":
            return "on" if self.default else "off"
        return str(self.default)

    @property
    def bounds(self) -> str:
        """``1 to 4096``, ``1 or more``, or nothing."""
        if self.low is None:
            return ""
        return f"{self.low:g} or more" if self.high is None else f"{self.low:.15g} to {self.high:.15g}"

    def from_file(self, value: object) -> Any:
        """A value of a TOML file, checked for its type. ConfigError says what the field takes."""
        if self.kind == "size" and isinstance(value, str):
            return parse_size(value)
        if self.kind == "list" and isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        wanted, kinds = _FILE_TYPES[self.kind]
        if not isinstance(value, kinds) or (isinstance(value, bool) and self.kind != "switch"):
            raise ConfigError(f"{self.name} is {value!r} but must be {wanted}")
        return float(value) if self.kind == "real" else value  # type: ignore[arg-type]  # int or float, checked above


_FILE_TYPES: dict[Kind, tuple[str, tuple[type, ...]]] = {
    "text": ("a string", (str,)),
    "choice": ("a string", (str,)),
    "whole": ("a whole number", (int,)),
    "real": ("a number", (int, float)),
    "switch": ("true or false", (bool,)),
    "size": ('a number of bytes, or a string such as "2GiB"', (int,)),
    "list": ("a list of strings", ()),
}


def config_fields(config: type) -> list[ConfigField]:
    """The fields of a config dataclass, in order. A field's type and its metadata say everything."""
    hints = get_type_hints(config)
    return [_describe(field, hints[field.name]) for field in fields(config)]


def _describe(field: Field[Any], hint: Any) -> ConfigField:
    if get_origin(hint) in (Union, types.UnionType):  # X | None
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    unit = field.metadata["unit"]
    choices: tuple[str, ...] = ()
    kind: Kind
    if get_origin(hint) is Literal:
        kind, choices = "choice", get_args(hint)
    elif get_origin(hint) is tuple:
        kind = "list"
    elif hint is int and unit == "bytes":
        kind = "size"
    else:
        kind = {str: "text", int: "whole", float: "real", bool: "switch"}[hint]  # type: ignore[assignment]
    assert field.default is not MISSING, field.name
    return ConfigField(
        name=field.name,
        kind=kind,
        doc=field.metadata["doc"],
        default=field.default,
        choices=choices,
        low=field.metadata["low"],
        high=field.metadata["high"],
        unit=unit,
    )


def parse_size(text: str) -> int:
    """``2GiB`` -> 2147483648, ``500MB`` -> 500000000, ``4096`` -> 4096. ConfigError for anything else.

    KiB, MiB, GiB and TiB are powers of 1024; kB, MB, GB and TB powers of 1000. A bare K, M or G is refused: programs
    disagree about its meaning.
    """
    match = _SIZE.fullmatch(text)
    unit = match[2].lower() if match else "?"
    if match is None or unit not in _UNITS:
        raise ConfigError(f"{text!r} is not a size; write bytes, or a number with KiB, MiB, GiB, kB, MB or GB")
    return int(float(match[1]) * (1024 if "i" in unit else 1000) ** _UNITS[unit]) if unit else _whole(match[1], text)


def _whole(number: str, text: str) -> int:
    if "." in number:
        raise ConfigError(f"{text!r} is not a whole number of bytes; add a unit such as GiB")
    return int(number)
