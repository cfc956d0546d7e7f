"""The filters that templates of model files may use, each within the rendering's budget.

Of Jinja's own those are missing that pad, wrap or format text and that no chat template needs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

from jinja2 import Environment, pass_context, pass_environment
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS as JINJA_FILTERS
from jinja2.filters import do_indent, do_max, do_min, do_round, do_sort, do_title, sync_do_groupby
from jinja2.runtime import Context
from markupsafe import Markup

from octavo.text.template_budget import (
    ITEM,
    disguised_characters,
    spend,
    spend_deep,
    spend_each,
    spend_result,
    to_text,
)

MAX_WIDTH = 999


def words(text: str) -> frozenset[str]:
    """The words of ``text``: a set that reads like a sentence."""
    return frozenset(text.split())


_KEPT_FILTERS = words(
    "abs attr capitalize count d default dictsort first float int items last length lower map reject "
    "rejectattr reverse select selectattr trim truncate unique upper"
)


def _paid(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # also copies the mark that says whether Jinja passes the context
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return spend_each(result) if isinstance(result, Iterator) else spend_result(result)

    return wrapper


def _list(values: Iterable[Any]) -> list[Any]:
    return list(spend_each(values))


def _comparable(values: Iterable[Any]) -> list[Any]:
    """As a list whose items may be compared with each other, which takes as long as they are deep."""
    items = _list(values)
    spend_deep(items)
    return items


@pass_environment
def _sort(environment: Environment, values: Iterable[Any], *args: Any, **kwargs: Any) -> list[Any]:
    return do_sort(environment, _comparable(values), *args, **kwargs)


@pass_environment
def _groupby(environment: Environment, values: Iterable[Any], *args: Any, **kwargs: Any) -> list[Any]:
    return sync_do_groupby(environment, _comparable(values), *args, **kwargs)


@pass_environment
def _min(environment: Environment, values: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
    return do_min(environment, _comparable(values), *args, **kwargs)


@pass_environment
def _max(environment: Environment, values: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
    return do_max(environment, _comparable(values), *args, **kwargs)


def replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    """``str.replace`` within the budget."""
    subject, sought, put = to_text(text), to_text(old), to_text(new)
    spend(len(subject) + subject.count(sought) * len(put))
    return subject.replace(sought, put, -1 if count is None else count)


def join_texts(separator: str, values: Iterable[Any]) -> str:
    """``str.join`` within the budget."""
    texts = []
    for value in values:
        spend(ITEM + len(separator))
        texts.append(to_text(value))
    return separator.join(texts)


@pass_context
def _join(context: Context, values: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        values = JINJA_FILTERS["map"](context, values, attribute=attribute)
    return join_texts(to_text(d), values)


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if isinstance(width, int) and width > MAX_WIDTH:
        raise SecurityError(f"indent by {width} is over the limit of {MAX_WIDTH}")
    text = to_text(text)
    spend(len(text) * (ITEM + (width if isinstance(width, int) else len(width))))  # all may be line ends
    return do_indent(text, width, first, blank)


def _title(text: Any) -> str:
    text = to_text(text)
    spend(ITEM * len(text))  # is split into words
    return do_title(text)


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > 32:
        raise SecurityError(f"round to {precision} digits is over the limit of 32")
    return do_round(value, precision, method)


def _sum(values: Iterable[float]) -> float:
    return sum(values)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as ``json.dumps`` writes it: unlike Jinja's own filter nothing is escaped for HTML.

    A character in disguise counts as what it stands for, but stays in disguise.
    """
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > MAX_WIDTH:
        raise SecurityError(f"tojson indents by more than {MAX_WIDTH}")
    encoder = json.JSONEncoder(ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    pieces = []
    for piece in encoder.iterencode(value):  # in pieces: a nested structure may print exponentially
        spend(len(piece) + 1)
        pieces.append(piece)
    text = "".join(pieces)
    if not ensure_ascii:
        return text
    disguised = disguised_characters()

    def escape_character(match: re.Match[str]) -> str:
        meant = disguised.get(match[0], match[0])
        return match[0] if meant.isascii() else json.dumps(meant)[1:-1]

    return re.sub("[^\x00-\x7f]", escape_character, text)


class _Safe(Markup):
    """Markup that escapes what it is joined with, characters in disguise too, as what they stand for."""

    @classmethod
    def escape(cls, value: Any) -> _Safe:
        escaped = super().escape(value)
        if hasattr(value, "__html__"):
            return escaped
        entities = {
            ord(c): str(Markup.escape(meant)) for c, meant in disguised_characters().items() if meant in "<>&'\""
        }
        return cls(str(escaped).translate(entities)) if entities else escaped


def _safe(value: Any) -> _Safe:
    return _Safe(to_text(value))


def _escape(value: Any) -> _Safe:
    return _Safe.escape(value if hasattr(value, "__html__") else to_text(value))


FILTERS: dict[str, Callable[..., Any]] = {
    **{name: _paid(JINJA_FILTERS[name]) for name in _KEPT_FILTERS},
    "e": _paid(_escape),
    "escape": _paid(_escape),
    "groupby": _groupby,
    "indent": _indent,
    "join": _join,
    "list": _list,
    "max": _max,
    "min": _min,
    "replace": replace,
    "round": _round,
    "safe": _safe,
    "sort": _sort,
    "string": to_text,
    "sum": _sum,
    "title": _title,
    "tojson": _tojson,
}
