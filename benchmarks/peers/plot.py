"""Ratios of a run as a picture: one row per figure, one mark per peer, with its interval. Plain SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from contenders import Pair
from ratios import Ratio
from results import Results
from tables import figures_of, heading

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 860, 250, 30, 96, 13
_INK, _FAINT = "#333", "#ddd"
_COLOURS = ("#0b6e99", "#c2571a", "#4f7a28", "#7b4ea3", "#a3263f", "#666")
_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)


def ratio_plot(results: Results, group: str) -> str:
    """An SVG document of the pairs of one group; the scale is logarithmic, and the line is where both are as fast."""
    pairs = [pair for pair in results.pairs if pair.group == group]
    rows = [
        (figure.label, [results.ratio(pair, task.name, figure) for pair in pairs])
        for task, figure in figures_of(results)
    ]
    marks = [(label, [(n, ratio) for n, ratio in enumerate(ratios) if ratio]) for label, ratios in rows if any(ratios)]
    values = [value for _, found in marks for _, ratio in found for value in _extent(ratio)]
    low, high = min([0.8, *values]) * 0.95, max([1.25, *values]) * 1.05

    def x(value: float) -> float:
        share = math.log(value / low) / math.log(high / low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    height = _TOP + sum(_ROW * len(found) + 10 for _, found in marks) + 34
    parts = [_text(16, 26, _title(results, group), size=15, bold=True), *_legend(pairs)]
    for tick in _TICKS:
        if low <= tick <= high:
            colour, thick = (_INK, 1.5) if tick == 1 else (_FAINT, 1)
            parts.append(_line(x(tick), _TOP - 8, x(tick), height - 28, colour, thick))
            parts.append(_text(x(tick), height - 12, f"{tick:g}", anchor="middle", size=12))
    y = float(_TOP)
    for label, found in marks:
        middle = y + _ROW * len(found) / 2
        parts.append(_text(_LEFT - 14, middle + 4, label.strip(), anchor="end", indent=label.startswith(" ")))
        for place, (number, ratio) in enumerate(found):
            parts.extend(_mark(ratio, x, y + _ROW * (place + 0.5), _COLOURS[number % len(_COLOURS)]))
        y += _ROW * len(found) + 10
        parts.append(_line(16, y - 5, _WIDTH - _RIGHT, y - 5, "#f0f0f0", 1))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {_WIDTH} {height:.0f}" font-family="sans-serif">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _title(results: Results, group: str) -> str:
    return f"How many times as fast octavo is: {results.facts['model']}, {group}"


def _extent(ratio: Ratio) -> Sequence[float]:
    """What must be in the picture. An interval of two rounds may be as wide as the sea: it is cut off."""
    low, high = (ratio.low, ratio.high) if ratio.low is not None and ratio.high is not None else (ratio.value,) * 2
    return max(low, ratio.value / 3), ratio.value, min(high, ratio.value * 3)


def _legend(pairs: Sequence[Pair]) -> list[str]:
    parts, left = [], 16.0
    for number, pair in enumerate(pairs):
        name = heading(pair)
        parts.append(f'<circle cx="{left + 6:.1f}" cy="52" r="4.5" fill="{_COLOURS[number % len(_COLOURS)]}"/>')
        parts.append(_text(left + 16, 56, name, size=12))
        left += 34 + 6.6 * len(name)
    parts.append(_text(16, 76, "right of the line octavo is faster; bars are 95 % intervals over rounds", size=11))
    return parts


def _mark(ratio: Ratio, x: Callable[[float], float], y: float, colour: str) -> list[str]:
    low, _, high = _extent(ratio)
    parts = [f'<circle cx="{x(ratio.value):.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>']
    if ratio.low is not None:
        parts.append(_line(x(low), y, x(high), y, colour, 2))
    return parts


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, thick: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{thick:g}"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 13, bold: bool = False, indent: bool = False
) -> str:
    colour = "#777" if indent else _INK
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>'
        f"{escape(text)}</text>"
    )
