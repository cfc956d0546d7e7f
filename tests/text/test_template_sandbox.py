"""Templates out of hostile model files end in time, small, and without reaching out."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2.exceptions import TemplateError

from octavo.text import template_budget
from octavo.text.template_budget import RenderLimit
from octavo.text.template_sandbox import SandboxedTemplate

RANGE = "{% set l = range(99999) | list %}"
TWINS = "{% set a = range(9999) | list %}{% set b = range(9999) | list + [1] %}{% set l = [b] * 40000 %}"
ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loop conditions": RANGE + "{% for a in range(99999) if a + 0.5 in l %}{% endfor %}",
    "filter tests": RANGE + "{{ range(99999) | reject('in', l) | list }}",
    "nested filters": RANGE + "{% for a in range(99999) %}{{ l | select('sameas', l) | list }}{% endfor %}",
    "recursive macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loops": "{% for x in [[]] recursive %}{{ loop([[], []]) }}{{ loop([[]]) }}{% endfor %}",
    "sorting": "{% for a in range(99999) %}{% set l = range(99999) | sort %}{% endfor %}",
    "membership": TWINS + "{{ a in l }}",
    "membership test": TWINS + "{{ a is in l }}",
    "selected membership": TWINS + "{{ [a] | select('in', l) | list }}",
    "index": TWINS + "{{ l.index(a) }}",
    "least": TWINS + "{{ (l + [a]) | min | length }}",
    "sorted twins": TWINS + "{{ (l + [a]) | sort | length }}",
    "membership of long strings": "{% set a = 'x' * 1000000 %}{% set b = 'x' * 999999 + 'y' %}{{ a in [b] * 100000 }}",
    "printing": "{% for a in range(99999) %}{% for b in range(9999) %}" + "x" * 999 + "{% endfor %}{% endfor %}",
}


def grow(start: str, step: str, then: str = "") -> str:
    """A template that takes the step from ``ns.s`` to the next 99 times."""
    return (
        f"{{% set ns = namespace(s={start}) %}}{{% for i in range(99) %}}{{% set ns.s = {step} %}}{{% endfor %}}{then}"
    )


BOMBS = {
    "string times": "{{ 'x' * 10 ** 10 }}",
    "list times": "{% set l = [1] * 10 ** 10 %}",
    "doubling": grow("'x'", "ns.s ~ ns.s"),
    "doubling by +": grow("'x'", "ns.s + ns.s"),
    "doubling lists": grow("[1]", "ns.s + ns.s"),
    "doubling blocks": "{% set ns = namespace(s='x') %}{% for i in range(99) %}"
    "{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}{% endfor %}",
    "nested lists": grow("[1]", "[ns.s, ns.s]"),
    "nested tuples": grow("[1]", "(ns.s, ns.s)"),
    "nested dicts": grow("1", "dict(a=ns.s, b=ns.s)"),
    "nested dict literals": grow("1", "{'a': ns.s, 'b': ns.s}"),
    "nested namespaces": grow("1", "namespace(a=ns.s, b=ns.s)", "{{ ns.s }}"),
    "namespaces in lists": grow("1", "namespace(a=[ns.s, ns.s])", "{{ [ns.s] }}"),
    "replace filter": "{% set s = 'x' * 10000 %}{{ s | replace('x', s) | replace('x', s) }}",
    "replace method": "{% set s = 'x' * 10000 %}{{ s.replace('x', s).replace('x', s) }}",
    "replace method in a loop": "{% for s in ['x' * 10000] %}{{ s.replace('x', s).replace('x', s) }}{% endfor %}",
    "join method in a loop": "{% for s in ['x' * 100000] %}{{ s.join(['a'] * 99999) }}{% endfor %}",
    "replace by keyword": "{% set s = 'x' * 10000 %}{{ (s | replace(old='x', new=s)) | replace(old='x', new=s) }}",
    "join filter": "{{ (['a'] * 99999) | join('x' * 100000) }}",
    "join method": "{{ ('x' * 100000).join(['a'] * 99999) }}",
    "mapped replace": "{{ range(99999) | map('replace', '', 'x' * 10000) | list }}",
    "center": "{{ 'x'.center(10 ** 10) }}",
    "ljust": "{{ 'x'.ljust(10 ** 10) }}",
    "zfill": "{{ 'x'.zfill(10 ** 10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 10) }}",
    "format width": "{{ '{:10000000000}'.format(1) }}",
    "format nested width": "{{ '{:{}}'.format(1, 10 ** 10) }}",
    "percent width": "{{ '%10000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10 ** 10, 1) }}",
    "indent": "{{ '\n\n' | indent(10 ** 10) }}",
    "indent text": "{% set s = 'x' * 1000000 %}{{ ('\n' * 1000000) | indent(s, blank=true) }}",
    "tojson indent": "{{ [1] | tojson(indent=10 ** 10) }}",
    "power": "{{ 10 ** 10000000000 }}",
    "squaring": grow("10", "ns.s * ns.s"),
    "round": "{{ 1.5 | round(10 ** 10, 'ceil') }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "list of strings": "{% set s = 'x' * 1000000 %}" + grow("[]", "ns.s + [s[1:]]"),
    "sum of lists": "{{ ([range(99999) | list] * 99999) | sum(start=[]) }}",
    "percent of many": "{{ ('%(a)s' * 100000) % {'a': 'x' * 100000} }}",
    "format of many": "{{ ('{0}' * 100000).format('x' * 100000) }}",
    "string to list": "{{ ('\u4e00' * 4000000) | list | length }}",
    "string to words": "{{ ('\u4e00 ' * 4000000).split() | length }}",
    "string to parts": "{{ ('\u4e00 ' * 4000000).split(sep=' ') | length }}",
    "string to lines": "{{ ('\u2028' * 4000000).splitlines(true) | length }}",
    "string to indented lines": "{{ ('\u2028' * 4000000) | indent | length }}",
    "string to arguments": "{{ [].index(*('\u4e00' * 4000000)) }}",
    "string to loop": "{% for c in ('\u4e00' * 4000000) | select %}{{ loop.length }}{% endfor %}",
    "sorted string": "{{ ('\u4e00' * 4000000) | sort | length }}",
    "padded many times": "{{ ('%999s' * 1000000) % (('x',) * 1000000) }}",
    "formatted many times": "{{ ('{0:999}' * 200000).format('x') }}",
    "attr center": "{{ ('x' | attr('center'))(10 ** 10) }}",
    "item center": "{{ 'x'['center'](10 ** 10) }}",
    "lipsum": "{{ lipsum(n=10 ** 6) }}",
    "date": "{{ strftime_now('%9999999999Y') }}",
}
#: CPU time without a look at the clock: 25 times the most that was measured (sorting), for slow machines.
LONGEST_GAP_S = 2.0
ESCAPES = (
    "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[0] }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ ''['__class__'].x }}",
    "{{ '' | attr('__class__') | string }}{{ ('' | attr('__class__')).x }}",
    "{{ range.__globals__.x }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}",
    "{{ '{0.__class__.__mro__}'.format(1) }}{{ '{0.__class__.__mro__[1].x}'.format('') }}",
    "{{ self._TemplateReference__context.x }}",
    "{{ namespace }}",
)


class Clock:
    """The CPU time of this thread in place of the wall clock: other programs do not shorten a rendering's time.

    longest_gap_s: between two looks at the clock, and from the last one until now. A limit is kept to within that.
    """

    def __init__(self) -> None:
        self._last_s = time.thread_time()
        self._longest_gap_s = 0.0

    def __call__(self) -> float:
        now_s = time.thread_time()
        self._longest_gap_s = max(self._longest_gap_s, now_s - self._last_s)
        self._last_s = now_s
        return now_s

    @property
    def longest_gap_s(self) -> float:
        self()
        return self._longest_gap_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(template_budget, "time", SimpleNamespace(monotonic=clock))
    return clock


def render(source: str, messages: Any = (), time_limit_s: float = 0.2) -> str:
    return SandboxedTemplate(source).render({"messages": messages}, time_limit_s=time_limit_s, num_input_chars=0)


@pytest.mark.slow
@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_an_endless_template_is_ended(source: str, clock: Clock) -> None:
    template = SandboxedTemplate(source)
    with pytest.raises((RenderLimit, RecursionError)):
        template.render({}, time_limit_s=0.2, num_input_chars=0)
    assert clock.longest_gap_s < LONGEST_GAP_S


@pytest.mark.slow
@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_defused_before_it_takes_memory(source: str, clock: Clock) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((RenderLimit, TemplateError, TypeError)):
            render(source, time_limit_s=0.5)
        assert clock.longest_gap_s < LONGEST_GAP_S
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_reach_out_or_change_what_it_is_given(source: str) -> None:
    messages = [{"role": "user"}]
    with pytest.raises((TemplateError, TypeError)):
        render(source, messages)
    assert messages == [{"role": "user"}]


def test_the_budget_grows_with_the_input() -> None:
    content = "é" * (4 << 20)
    template = SandboxedTemplate("{% for i in range(12) %}{{ messages[0] | trim }}{% endfor %}")
    with pytest.raises(RenderLimit, match="more text"):
        template.render({"messages": [content]}, time_limit_s=5, num_input_chars=0)
    text = template.render({"messages": [content]}, time_limit_s=5, num_input_chars=len(content))
    assert text == content * 12


def test_renderings_after_a_stopped_one_have_their_own_budget() -> None:
    for _ in range(2):
        with pytest.raises(RenderLimit):
            render(ENDLESS["nested loops"], time_limit_s=0.01)
        assert render("{{ messages }}", [1]) == "[1]"
