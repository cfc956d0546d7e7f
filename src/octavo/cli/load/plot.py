"""A run as a picture: how latencies are distributed, and ITL over time. Plain SVG: nothing has to be installed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from octavo.cli.load.measures import REQUEST_LATENCIES, answered
from octavo.cli.load.sample import Sample

_WIDTH, _HEIGHT = 960, 640
_INK, _FAINT, _SHADE = "#333", "#ddd", "#f6d5c4"
_COLOURS = ("#0b6e99", "#c2571a", "#4f7a28", "#7b4ea3")
#: Points beyond this are thinned: of each cell of the panel's grid one is kept.
_MAX_POINTS = 4000
#: Points of a curve.
_CURVE = 200

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Values -> pixels. ``ticks`` carry their labels."""

    low: float
    high: float
    start: float  # pixels
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (map(math.log, (self.low, self.high, value))) if self.is_log else (self.low, self.high, value)
        return self.start + (self.end - self.start) * (at - low) / (high - low)

    def ticks(self) -> list[tuple[float, str]]:
        """From about three to six, round ones."""
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1) if self.is_log else ()
        for steps in ((1,), (1, 3), (1, 2, 5)):
            values = [step * 10.0**decade for decade in decades for step in steps]
            values = [value for value in values if self.low <= value <= self.high]
            if len(values) >= 3:
                break
        else:  # linear, or a logarithmic axis so short that it nearly is
            step = _round_step((self.high - self.low) / 4)
            values = [step * index for index in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [(value, f"{value:,.10g}") for value in values]


def _round_step(raw: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= raw * 0.999)


def figure(samples: Sequence[Sample], title: str) -> str:
    """An SVG document: the distributions of TTFT, TPOT, ITL and E2E, and below them every gap at its time."""
    good = answered(samples)
    groups = sorted({sample.group for sample in good})
    kinds: list[tuple[str, Callable[[Sample], list[float]]]] = [
        (name.upper(), lambda sample, attribute=attribute: _listed(getattr(sample, attribute)))  # type: ignore[misc]
        for name, attribute in REQUEST_LATENCIES.items()
    ]
    kinds.insert(2, ("ITL", lambda sample: sample.itl_s))
    parts = [_text(20, 26, title, size=14, anchor="start")]
    for number, (name, values_of) in enumerate(kinds):
        curves = [
            (group, sorted(value for sample in good if sample.group == group for value in values_of(sample)))
            for group in groups
        ]
        parts.append(_distribution(name, curves, left=60 + number * 230, top=70))
    parts.append(_over_time(samples, good, groups))
    for number, group in enumerate(groups if len(groups) > 1 else ()):
        parts.append(_text(700 + 80 * number, 360, group or "requests", colour=_COLOURS[number % 4], anchor="start"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _listed(value: float | None) -> list[float]:
    return [] if value is None else [value]


def _distribution(name: str, curves: Sequence[tuple[str, list[float]]], *, left: float, top: float) -> str:
    """A panel: the share of values up to x, x in milliseconds on a logarithmic axis."""
    width, height = 180, 230
    shown = [
        (number, [max(value * 1e3, 1e-3) for value in values]) for number, (_, values) in enumerate(curves) if values
    ]
    if not shown:
        return _text(left + width / 2, top + height / 2, f"no {name}")
    low, high = min(values[0] for _, values in shown), max(values[-1] for _, values in shown)
    x = Axis(low=low / 1.2, high=high * 1.2, start=left, end=left + width, is_log=True)
    y = Axis(low=0, high=1, start=top + height, end=top)
    parts = [_frame(x, y, f"{name}, ms", [(share / 4, f"{share * 25} %") for share in range(5)], labels=left < 100)]
    for number, values in shown:
        every = max(1, len(values) // _CURVE)
        points = [(values[index], (index + 1) / len(values)) for index in range(0, len(values), every)]
        path = [(points[0][0], 0.0), *points, (values[-1], 1.0)]
        # a step: the share does not grow before the next value
        steps = [path[0]]
        for (_, before), (value, share) in itertools.pairwise(path):
            steps += [(value, before), (value, share)]
        drawn = " ".join(f"{x(value):.1f},{y(share):.1f}" for value, share in steps)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{_COLOURS[number % 4]}" stroke-width="1.5"/>')
    return "\n".join(parts)


def _over_time(samples: Sequence[Sample], good: Sequence[Sample], groups: Sequence[str]) -> str:
    """The panel below: each gap at the time it ended; shaded while a long prompt waits for its first token."""
    left, top, width, height = 60.0, 375.0, 870.0, 220.0
    gaps = {
        group: [
            (later, max((later - earlier) * 1e3, 1e-3))
            for sample in good
            if sample.group == group
            for earlier, later in itertools.pairwise(sample.arrivals_s)
        ]
        for group in groups
    }
    every = [gap for points in gaps.values() for _, gap in points]
    if not every:
        return _text(left + width / 2, top + height / 2, "no ITL")
    end_s = max(sample.end_s or 0.0 for sample in samples)
    x = Axis(low=0, high=end_s, start=left, end=left + width)
    y = Axis(low=min(every) / 1.2, high=max(every) * 1.2, start=top + height, end=top, is_log=True)
    parts = []
    for sample in samples:
        if sample.group == "long":
            begin, until = sample.arrival_s, sample.event_times_s[0] if sample.event_times_s else sample.end_s or end_s
            parts.append(
                f'<rect x="{x(begin):.1f}" y="{top}" width="{max(x(until) - x(begin), 1):.1f}" height="{height}" '
                f'fill="{_SHADE}" fill-opacity="0.5"/>'
            )
    parts.append(_frame(x, y, "ITL in ms, over seconds of the run", y.ticks(), labels=True))
    for number, group in enumerate(groups):
        dots = "".join(f"M{x(at):.1f},{y(gap):.1f}h0" for at, gap in _thinned(gaps[group], x, y))
        parts.append(
            f'<path d="{dots}" stroke="{_COLOURS[number % 4]}" stroke-width="2.5" stroke-linecap="round" '
            'stroke-opacity="0.45"/>'
        )
    return "\n".join(parts)


def _thinned(points: Sequence[Point], x: Axis, y: Axis) -> list[Point]:
    """All, or one of each cell, so that outliers stay where a random choice would lose them."""
    if len(points) <= _MAX_POINTS:
        return list(points)
    return list({(round(x(at) / 3), round(y(value) / 2)): (at, value) for at, value in points}.values())


def _frame(x: Axis, y: Axis, title: str, y_ticks: Sequence[tuple[float, str]], *, labels: bool) -> str:
    """Grid lines, labels and the title of a panel."""
    parts = [_text(x.start, y.end - 8, title, size=12, anchor="start")]
    free = -math.inf  # where the next label fits
    for value, label in x.ticks():
        parts.append(_line(x(value), y.start, x(value), y.end))
        if x(value) >= free:
            parts.append(_text(x(value), y.start + 15, label))
            free = x(value) + 6 * len(label) + 6
    for value, label in y_ticks:
        parts.append(_line(x.start, y(value), x.end, y(value)))
        if labels:
            parts.append(_text(x.start - 6, y(value) + 4, label, anchor="end"))
    parts.append(_line(x.start, y.start, x.end, y.start, colour=_INK))
    return "\n".join(parts)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = _FAINT) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, *, size: int = 11, anchor: str = "middle", colour: str = _INK) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
    )
