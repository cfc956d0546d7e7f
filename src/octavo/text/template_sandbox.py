"""Jinja for templates that come out of model files: no side effects, bounded time, bounded memory.

A thread cannot be killed, so a template is made to look at its budget itself. Before compilation every loop body, loop
condition, macro, list, comparison and ``~`` of its syntax tree gets a call that spends from the budget of the rendering
under way; operators, filters, method calls and output spend the size of what they make, those that can make much of
little before they make it. Spending looks at the clock. What can blow up in one step and no chat template needs is
left out: most methods of built-in types, some filters, ``lipsum``.

Covered: endless and nested loops, recursive macros, doubling strings and lists, padded formats, huge numbers, deep
structures that print or compare exponentially. Not covered: what one call into C does with data that the budget allows
(milliseconds, as in sorting), and the compiler's own work, which is bounded by the length of the source.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NoReturn

from jinja2 import Environment, Template, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError, TemplateRuntimeError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from octavo.text.template_budget import ITEM, render_budget, spend, spend_deep, spend_each, spend_result, to_text
from octavo.text.template_filters import FILTERS, MAX_WIDTH, join_texts, replace, words

MAX_SOURCE_CHARS = 1 << 18
# What expressions of a template raise when the messages are not of the shape that it expects.
EXPRESSION_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
_MAX_INT_BITS = 4096
_STR_METHODS = words(
    "capitalize count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace istitle "
    "isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split "
    "splitlines startswith strip swapcase title upper"
)
_METHODS: tuple[tuple[type | tuple[type, ...], frozenset[str]], ...] = (
    (str, _STR_METHODS),
    (Mapping, words("get items keys values")),
    ((list, tuple), words("count index")),
    ((int, float, bytes, range), frozenset()),
)
_WIDE_FORMAT = re.compile(r"\d{4}|\*")
_WIDE_BRACES = re.compile(r"\d{4}|\{[^}]*\{")


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator in ("*", "**"):
            _check_product(operator, left, right)
        elif operator == "%" and isinstance(left, str):
            if _WIDE_FORMAT.search(left):
                raise SecurityError(f"format {left!r:.40} asks for padding")
            spend(left.count("%") * (spend_deep(right) + MAX_WIDTH))
        return spend_result(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kinds, allowed in _METHODS:
            if isinstance(obj, kinds):
                return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        pattern: str = value.__self__
        if _WIDE_BRACES.search(pattern):
            raise SecurityError(f"format {pattern!r:.40} asks for padding")

        def spending(*args: Any, **kwargs: Any) -> str:
            spend(pattern.count("{") * (spend_deep(args) + spend_deep(kwargs) + MAX_WIDTH))
            return wrapped(*args, **kwargs)

        return spending

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        spend(1)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            for name in ("_loop_vars", "_block_vars"):  # what Jinja adds for callees that want the context
                kwargs.pop(name, None)
            if __obj.__name__ == "replace":
                return replace(owner, *args, **kwargs)
            if __obj.__name__ == "join":
                return join_texts(owner, *args, **kwargs)
            if __obj.__name__ in ("split", "rsplit", "splitlines"):
                separator = kwargs.get("sep", args[0] if args else None)
                spend(ITEM * (owner.count(separator) if separator and isinstance(separator, str) else len(owner)))
        elif isinstance(owner, list | tuple):  # index and count compare
            spend_deep(owner)
        result = super().call(__context, __obj, *args, **kwargs)
        if __obj is dict:
            spend_deep(result)
        return spend_result(result)

    def call_filter(self, *args: Any, **kwargs: Any) -> Any:
        spend(1)
        return super().call_filter(*args, **kwargs)

    def call_test(self, *args: Any, **kwargs: Any) -> Any:
        spend(1)
        return super().call_test(*args, **kwargs)


def _check_product(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_INT_BITS:
            raise SecurityError(f"a number of {bits} bits is over the limit of {_MAX_INT_BITS}")
        return
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            spend(max(times, 0) * len(sequence) * (1 if isinstance(sequence, str) else ITEM))


@pass_context  # so that the compiler cannot evaluate it
def _tick(context: Context, work: int) -> str:
    spend(work)
    return ""


@pass_context
def _literal(context: Context, value: Any) -> Any:
    spend_deep(value)
    return value


@pass_context
def _concat(context: Context, parts: list[Any]) -> str:
    return "".join(map(to_text, parts))


@pass_context
def _compared(context: Context, value: Any) -> Any:
    """The right side of a comparison or of ``in``: finding out takes no longer than walking through it."""
    if isinstance(value, str | list | tuple | Mapping):
        spend_deep(value)
    return value


@pass_context
def _arguments(context: Context, values: Any) -> list[Any]:
    return list(spend_each(values))


_COMPARING_TESTS = words("!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lt ne")


def _paid_test(test: Any) -> Callable[[Any, Any], bool]:
    """One of Jinja's tests that compare."""

    def wrapper(value: Any, other: Any) -> bool:
        if isinstance(other, str | list | tuple | Mapping):
            spend_deep(other)
        return bool(test(value, other))

    return wrapper


@pass_context
def _finalize(context: Context, value: Any) -> str:
    return to_text(value)


def _filter(operand: nodes.Expr, name: str) -> nodes.Filter:
    """A call of one of our own filters, whose names cannot be written in a template."""
    return nodes.Filter(operand, f"octavo {name}", [], [], None, None)


def _spend_on_data(node: nodes.Output) -> nodes.Node:
    num_chars = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
    if num_chars:
        node.nodes.insert(0, _filter(nodes.Const(num_chars), "tick"))
    return node


def _spend_in_body(node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
    node.body.insert(0, nodes.ExprStmt(_filter(nodes.Const(1), "tick")))
    if isinstance(node, nodes.For) and node.test is not None:
        node.test = nodes.Or(_filter(nodes.Const(1), "tick"), node.test)  # the tick is "", so the test decides
    return node


def _spend_on_arguments(node: nodes.Call | nodes.Filter | nodes.Test) -> nodes.Node:
    if node.dyn_args is not None:
        node.dyn_args = _filter(node.dyn_args, "arguments")
    return node


def _spend_on_compare(node: nodes.Compare) -> nodes.Node:
    for operand in node.ops:
        if not isinstance(operand.expr, nodes.Const):
            operand.expr = _filter(operand.expr, "compared")
    return node


def _spend_on_concat(node: nodes.Concat) -> nodes.Node:
    return _filter(nodes.List(node.nodes), "concat")


def _spend_on_literal(node: nodes.List | nodes.Dict | nodes.Tuple) -> nodes.Node:
    is_target = isinstance(node, nodes.Tuple) and node.ctx == "store"
    return node if is_target else _filter(node, "literal")


_INSTRUMENTS: dict[type[nodes.Node], Callable[[Any], nodes.Node]] = {
    nodes.Output: _spend_on_data,
    nodes.For: _spend_in_body,
    nodes.Macro: _spend_in_body,
    nodes.CallBlock: _spend_in_body,
    nodes.Call: _spend_on_arguments,
    nodes.Filter: _spend_on_arguments,
    nodes.Test: _spend_on_arguments,
    nodes.Compare: _spend_on_compare,
    nodes.Concat: _spend_on_concat,
    nodes.List: _spend_on_literal,
    nodes.Dict: _spend_on_literal,
    nodes.Tuple: _spend_on_literal,
}


class _Instrument(NodeTransformer):
    """Puts the spending calls into a syntax tree, innermost nodes first."""

    def get_visitor(self, node: nodes.Node) -> Callable[..., nodes.Node] | None:
        instrument = _INSTRUMENTS.get(type(node))
        return None if instrument is None else lambda node: instrument(self.generic_visit(node))


class _GenerationTag(Extension):
    """``{% generation %}`` marks what to train on; for inference its body is all there is to it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 100 or _WIDE_FORMAT.search(pattern):
        raise SecurityError(f"date format {pattern!r:.40} is too long")
    return datetime.now().strftime(pattern)


def _new_environment() -> Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        finalize=_finalize,
        extensions=[LoopControlExtension, _GenerationTag],
    )
    environment.filters = {
        **FILTERS,
        "octavo tick": _tick,
        "octavo concat": _concat,
        "octavo literal": _literal,
        "octavo compared": _compared,
        "octavo arguments": _arguments,
    }
    environment.tests |= {name: _paid_test(environment.tests[name]) for name in _COMPARING_TESTS}
    for name in ("cycler", "joiner", "lipsum"):
        environment.globals.pop(name)
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


class SandboxedTemplate:
    """A compiled template. Rendering is safe from several threads.

    Raises ``TemplateError``, or what Python raises for sources nested too deeply, if the source does not compile.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateRuntimeError(f"the template has {len(source)} characters; the limit is {MAX_SOURCE_CHARS}")
        environment = _new_environment()
        self.tree = environment.parse(source)
        # Parsed again: instrumenting changes the tree in place, and ``tree`` is for those who look for literals.
        instrumented = _Instrument().visit(environment.parse(source))
        instrumented.set_environment(environment)
        code = environment.compile(instrumented)
        self._template = Template.from_code(environment, code, environment.make_globals(None))
        self.variables = frozenset(find_undeclared_variables(self.tree))  # that it looks up in what it is given

    def render(
        self,
        variables: Mapping[str, Any],
        *,
        time_limit_s: float,
        num_input_chars: int,
        disguised: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """The text. Raises ``RenderLimit``, ``TemplateError`` or what the template's expressions raise.

        disguised: characters in ``variables`` that stand for others -> which
        """
        with render_budget(num_input_chars, time_limit_s, disguised):
            return "".join(self._template.generate(variables))


@lru_cache(maxsize=8)
def compile_template(source: str) -> SandboxedTemplate:
    """The template, compiled once for all who ask. Raises as ``SandboxedTemplate`` does."""
    return SandboxedTemplate(source)
