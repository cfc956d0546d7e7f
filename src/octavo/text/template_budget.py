"""What a rendering may still do: the purse that ``template_sandbox`` makes every operation of a template pay from."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from jinja2 import Undefined
from jinja2.exceptions import SecurityError

_BASE_WORK = 32 << 20
_WORK_PER_INPUT = 64  # templates copy and search each message a few times: concatenation, trim, output
ITEM = 32  # a list's item takes as much memory as so many characters


class RenderLimit(Exception):
    """The template used up its time or its work. No ``TemplateError``: those are the template's own."""


class RenderBudget:
    """Work, in characters made or compared, and time that a rendering has left.

    disguised: characters in its input that stand for others -> which (chat_template.py)
    """

    def __init__(self, work: float, time_limit_s: float, disguised: Mapping[str, str]) -> None:
        self.disguised = disguised
        self._work_left = work
        self._time_limit_s = time_limit_s
        self._deadline = time.monotonic() + time_limit_s

    def spend(self, work: float) -> None:
        """Raise ``RenderLimit`` when either is used up."""
        self._work_left -= work
        if self._work_left < 0:
            raise RenderLimit("the chat template builds more text than its limit allows")
        if time.monotonic() > self._deadline:
            raise RenderLimit(f"the chat template ran longer than its limit of {self._time_limit_s:g} s")


_budget: ContextVar[RenderBudget | None] = ContextVar("octavo_render_budget", default=None)


@contextmanager
def render_budget(
    num_input_chars: int, time_limit_s: float, disguised: Mapping[str, str] = MappingProxyType({})
) -> Iterator[None]:
    """Within this block templates of this thread may work in proportion to their input, and so long."""
    token = _budget.set(RenderBudget(_BASE_WORK + _WORK_PER_INPUT * num_input_chars, time_limit_s, disguised))
    try:
        yield
    finally:
        _budget.reset(token)


def disguised_characters() -> Mapping[str, str]:
    """Characters that stand for others in the rendering under way in this thread -> which."""
    budget = _budget.get()
    return {} if budget is None else budget.disguised


def spend(work: float) -> None:
    """Take from the budget of the rendering under way in this thread; raise ``RenderLimit`` when it is used up."""
    budget = _budget.get()
    if budget is not None:
        budget.spend(work)


def spend_result(value: Any) -> Any:
    """``value``, paid for by its size."""
    if isinstance(value, str):
        spend(len(value))
    elif isinstance(value, list | tuple | dict):
        spend(ITEM * len(value))
    else:
        spend(1)
    return value


def spend_deep(value: Any) -> int:
    """Spend for everything inside, as often as it would be printed. Objects that could hide more are refused.

    returns: what was spent
    """
    total = 0
    stack = [value]
    while stack:
        item = stack.pop()
        size = ITEM
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, Mapping):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
        elif not (item is None or isinstance(item, int | float | Undefined | range)):
            raise SecurityError(f"a {type(item).__name__} cannot be printed or put in a list")
        spend(size)
        total += size
    return total


def to_text(value: Any) -> str:
    """``str(value)`` within the budget."""
    if isinstance(value, str):
        spend(len(value))
        return value
    spend_deep(value)
    return str(value)


def spend_each(values: Iterable[Any]) -> Iterator[Any]:
    """The same items, each paid for when it is taken."""
    for item in values:
        spend(ITEM)
        yield item
