"""Line charts as SVG elements."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from apex.tools.report.scales import (
    AROUND_ZERO,
    Axis,
    Frame,
    step_ticks,
    tick_label,
    value_range,
    value_ticks,
)

MOST_NAMES = 16
NAME_ROOM = 88
NARROW = 400

LETTER = 6.4
"""Mean width of a label's letter."""

LABEL_GAP = 13.0
"""Least distance of two labels' baselines."""

_DECAY = 0.8
"""Of a smoothed line's moving average, per step."""


@dataclass(frozen=True)
class Line:
    """One variant's curve.

    Attributes:
        level: Name of the variant, also the CSS class of its colour.
        values: One per step from ``Chart.first_step`` on; drawing stops at the first value that is
            not finite.
        marks: Steps to mark with a cross.
        raw: Values to draw faintly behind the line, such as those before smoothing.
    """

    level: str
    values: tuple[float, ...]
    marks: tuple[int, ...] = ()
    raw: tuple[float, ...] = ()


@dataclass(frozen=True)
class Chart:
    """The content of a chart, at any size.

    Attributes:
        title: Read aloud by screen readers.
        lines: In drawing order, the last on top.
        axis: Scale of the value axis.
        shape: "line" joins the values, "stairs" holds each until the next, "dots" adds dots.
        steps: Step of every value, and of those that no line has; from 1 on by default.
        rules: Values with a horizontal line, and their labels.
        unit: What a step is.
        names: Names of the steps, written below a wide chart if they are few.
        band: Ends of a shaded band at every step, such as the noise of fp32.
        limit: Largest distance from 0 that an axis around 0 shows; by default all values.
    """

    title: str
    lines: tuple[Line, ...]
    axis: Axis = "log10"
    shape: Literal["line", "stairs", "dots"] = "line"
    steps: Sequence[int] = range(1, sys.maxsize)
    rules: tuple[tuple[float, str], ...] = ()
    unit: str = "step"
    names: tuple[str, ...] = ()
    band: tuple[tuple[float, float], ...] = ()
    limit: float = math.inf

    @property
    def drawn_steps(self) -> Sequence[int]:
        """The steps of the longest line."""
        return self.steps[: max(len(line.values) for line in self.lines)]


@dataclass(frozen=True)
class Element:
    """One SVG element; ``power`` is an exponent after the text."""

    tag: str
    attributes: Mapping[str, str | int]
    text: str = ""
    power: str = ""


@dataclass(frozen=True)
class Picture:
    """A chart drawn at one size, by elements in drawing order; ``kind`` is its CSS class."""

    kind: str
    title: str
    frame: Frame
    elements: tuple[Element, ...]


def picture(chart: Chart, *, width: int, height: int, kind: str) -> Picture:
    """Returns ``chart`` drawn at a size."""
    values = _range(chart)
    named = 0 < len(chart.names) <= MOST_NAMES and width > NARROW
    frame = Frame(
        width,
        height + (NAME_ROOM // 2 if named else 0),
        chart.axis,
        (chart.drawn_steps[0], chart.drawn_steps[-1]),
        values,
        right=max(_label_room(chart), NAME_ROOM - 14 if named else 14),
        bottom=NAME_ROOM if named else 30,
    )
    elements = [*_band(chart, frame), *_grid(chart, frame)]
    elements += _name_ticks(chart, frame) if named else _ticks(chart, frame)
    elements += [_line("axis", frame, frame.plot_bottom)]
    for place, line in enumerate(chart.lines):
        elements += _curve(chart, line, frame, width=_stroke(place, len(chart.lines)))
    elements += _labels(chart, frame)
    return Picture(kind, chart.title, frame, tuple(elements))


def smooth(values: Sequence[float]) -> tuple[float, ...]:
    """Returns the exponential moving average.

    It is divided by the sum of the weights, so that the first values are not biased towards zero.
    """
    mean, weight, means = 0.0, 0.0, []
    for value in values:
        mean = _DECAY * mean + (1 - _DECAY) * value
        weight = _DECAY * weight + (1 - _DECAY)
        means.append(mean / weight)
    return tuple(means)


def _range(chart: Chart) -> tuple[float, float]:
    drawn = [value for value, _ in chart.rules]
    drawn += [value for line in chart.lines for value in line.values]
    if chart.axis not in AROUND_ZERO:
        drawn += [value for line in chart.lines for value in line.raw]
        return value_range(drawn, chart.axis)
    drawn += [end for ends in chart.band for end in ends]
    return value_range([min(max(v, -chart.limit), chart.limit) for v in drawn], chart.axis)


def _label_room(chart: Chart) -> int:
    """Returns the width of the longest label at a line's end."""
    return round(max(len(line.level) for line in chart.lines) * LETTER) + 14


def _stroke(place: int, count: int) -> float:
    """Returns a curve's width; the first is the widest, so that coinciding curves stay visible."""
    return 2.0 if count == 1 else 5.0 - 3.0 * place / (count - 1)


def _element(tag: str, kind: str, text: str = "", power: str = "", **at: str | float) -> Element:
    """Returns an element; ``at`` holds attributes, with ``_`` for ``-``."""
    shown = {
        name.replace("_", "-"): f"{value:.1f}" if isinstance(value, float) else value
        for name, value in at.items()
    }
    return Element(tag, {"class": kind, **shown}, text, power)


def _line(kind: str, frame: Frame, y: float) -> Element:
    return _element("line", kind, x1=frame.left, x2=frame.plot_right, y1=y, y2=y)


def _ticks(chart: Chart, frame: Frame) -> list[Element]:
    bottom = frame.plot_bottom
    drawn = [_element("text", "tick y", chart.unit, x=frame.left - 8, y=bottom + 14)]
    for step in step_ticks(*frame.steps, most=max(frame.width // 90, 3)):
        x = frame.x(step)
        drawn.append(_element("line", "grid", x1=x, x2=x, y1=bottom, y2=bottom + 4))
        drawn.append(_element("text", "tick x", str(step), x=x, y=bottom + 18))
    return drawn


def _name_ticks(chart: Chart, frame: Frame) -> list[Element]:
    y = frame.plot_bottom + 16
    return [
        _element(
            "text", "tick", name, transform=f"translate({frame.x(step) - 4:.1f} {y}) rotate(30)"
        )
        for step, name in zip(chart.steps, chart.names, strict=False)
    ]


def _grid(chart: Chart, frame: Frame) -> list[Element]:
    drawn = []
    for value in value_ticks(*frame.values, chart.axis):
        y = frame.y(value)
        drawn.append(_line("grid", frame, y))
        label = tick_label(value, chart.axis)
        drawn.append(_element("text", "tick y", *label, x=frame.left - 8, y=y))
    for value, name in chart.rules:
        y = frame.y(value)
        drawn.append(_line("rule", frame, y))
        drawn.append(_element("text", "tick rule-name", name, x=frame.left + 6, y=y - 6))
    return drawn


def _band(chart: Chart, frame: Frame) -> list[Element]:
    ends = [
        (frame.x(step), frame.y(low), frame.y(high))
        for step, (low, high) in zip(chart.steps, chart.band, strict=False)
        if math.isfinite(low) and math.isfinite(high)
    ]
    if len(ends) < 2:
        return []
    there = "L".join(f"{x:.1f} {high:.1f}" for x, _, high in ends)
    back = "L".join(f"{x:.1f} {low:.1f}" for x, low, _ in reversed(ends))
    return [_element("path", "band", d=f"M{there}L{back}Z")]


def _labels(chart: Chart, frame: Frame) -> list[Element]:
    """Returns the name of each line beside its end, moved apart where they would overlap."""
    ends: dict[float, list[tuple[float, str]]] = {}
    for line in chart.lines:
        if points := _points(chart, line.values, frame):
            x, y = points[-1]
            ends.setdefault(x, []).append((y, line.level))
    drawn = []
    for x, labels in ends.items():
        labels.sort()
        places = spread_out([y for y, _ in labels], LABEL_GAP, frame.top, frame.plot_bottom)
        for (y, level), place in zip(labels, places, strict=True):
            if abs(place - y) > 2:
                leader = f"M{x + 2:.1f} {y:.1f}L{x + 8:.1f} {place:.1f}"
                drawn.append(_element("path", f"leader {level}", d=leader))
            drawn.append(_element("text", f"end {level}", level, x=x + 10, y=place))
    return drawn


def spread_out(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Returns ascending ``places`` moved at least ``gap`` apart, as far as possible within ends."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + gap) if moved else max(place, low))
    beyond = high
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], beyond)
        beyond = moved[index] - gap
    return moved


def _curve(chart: Chart, line: Line, frame: Frame, *, width: float) -> list[Element]:
    drawn = []
    if line.raw:
        drawn.append(_element("path", f"raw {line.level}", d=_path(chart, line.raw, frame)))
    path = _path(chart, line.values, frame)
    drawn.append(_element("path", f"line {line.level}", stroke_width=width, d=path))
    if chart.shape == "dots":
        drawn += [
            _element("circle", f"dot {line.level}", cx=x, cy=y, r=width / 2 + 1.5)
            for x, y in _points(chart, line.values, frame)
        ]
    for step in line.marks:
        x, y = frame.x(step), frame.y(line.values[chart.steps.index(step)])
        cross = f"M{x - 8:.1f} {y - 8:.1f}l16 16m0 -16l-16 16"
        drawn.append(_element("path", f"mark {line.level}", d=cross))
    return drawn


def _path(chart: Chart, values: Sequence[float], frame: Frame) -> str:
    points = _points(chart, values, frame)
    if not points:
        return ""
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for x, y in points[1:]:
        path += f"H{x:.1f}V{y:.1f}" if chart.shape == "stairs" else f"L{x:.1f} {y:.1f}"
    return path


def _points(chart: Chart, values: Sequence[float], frame: Frame) -> list[tuple[float, float]]:
    finite = itertools.takewhile(math.isfinite, values)
    return [(frame.x(step), frame.y(v)) for v, step in zip(finite, chart.steps, strict=False)]
