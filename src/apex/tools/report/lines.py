"""Line charts as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from apex.tools.report.scales import (
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


@dataclass(frozen=True)
class Line:
    """One variant's curve.

    Attributes:
        level: Its name, also the CSS class that colours it.
        values: One per step, the first at ``Chart.first_step``; not drawn from the first value on
            that is not finite.
        marks: Steps to mark with a cross.
        raw: Values to draw faintly behind, for example before smoothing.
    """

    level: str
    values: tuple[float, ...]
    marks: tuple[int, ...] = ()
    raw: tuple[float, ...] = ()


@dataclass(frozen=True)
class Chart:
    """What a chart shows, whatever its size.

    Attributes:
        title: Read aloud by screen readers.
        lines: Drawn in this order, the last on top.
        axis: Of the values.
        shape: "line" joins the values, "stairs" holds each until the next, "dots" joins and dots.
        first_step: The step of every line's first value.
        steps: The step of every value, where they are not one apart.
        rules: Values to draw a horizontal line at, with their labels.
        unit: What a step is.
        names: Of the steps, to write below a wide chart where they are few.
    """

    title: str
    lines: tuple[Line, ...]
    axis: Axis = "log10"
    shape: Literal["line", "stairs", "dots"] = "line"
    first_step: int = 1
    steps: tuple[int, ...] = ()
    rules: tuple[tuple[float, str], ...] = ()
    unit: str = "step"
    names: tuple[str, ...] = ()

    def step(self, index: int) -> int:
        """Returns the step of every line's value number ``index``."""
        return self.steps[index] if self.steps else self.first_step + index

    @property
    def last_step(self) -> int:
        """The step of the longest line's last value."""
        return self.step(max(len(line.values) for line in self.lines) - 1)


def svg(chart: Chart, *, width: int, height: int, kind: str) -> str:
    """Returns ``chart`` as one SVG element of class ``kind``."""
    drawn = [v for line in chart.lines for v in (*line.values, *line.raw)]
    drawn += [value for value, _ in chart.rules]
    ends = value_range(drawn, chart.axis)
    named = 0 < len(chart.names) <= MOST_NAMES and width > NARROW
    frame = Frame(
        width,
        height + (NAME_ROOM // 2 if named else 0),
        chart.axis,
        (chart.step(0), chart.last_step),
        ends,
        right=NAME_ROOM - 14 if named else 14,
        bottom=NAME_ROOM if named else 30,
    )
    parts = _grid(chart, frame, _name_ticks(chart, frame) if named else _ticks(chart, frame))
    for place, line in enumerate(chart.lines):
        parts += _curve(chart, line, frame, width=_stroke(place, len(chart.lines)))
    bottom = frame.height - frame.bottom
    return (
        f'<svg class="{kind}" viewBox="0 0 {frame.width} {frame.height}" role="img" '
        f'aria-label="{escape(chart.title)}" data-left="{frame.left}" '
        f'data-right="{frame.width - frame.right}">'
        + "".join(parts)
        + f'<line class="cursor" y1="{frame.top}" y2="{bottom}"/></svg>'
    )


def smooth(values: Sequence[float], keep: float = 0.8) -> tuple[float, ...]:
    """Returns the running mean that weights each step ``keep`` times the next one.

    Divided by the sum of the weights, so that the first values are not pulled to zero.
    """
    mean, weight, means = 0.0, 0.0, []
    for value in values:
        mean = keep * mean + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        means.append(mean / weight)
    return tuple(means)


def _stroke(place: int, count: int) -> float:
    """Returns a curve's width: the first is the broadest, so that all show where they coincide."""
    return 2.0 if count == 1 else 7.0 - 5.0 * place / (count - 1)


def _ticks(chart: Chart, frame: Frame) -> list[str]:
    bottom = frame.height - frame.bottom
    ticks = step_ticks(*frame.steps, most=max(frame.width // 90, 3))
    parts = [f'<text class="tick y" x="{frame.left - 8}" y="{bottom + 14}">{chart.unit}</text>']
    for x, step in ((f"{frame.x(step):.1f}", step) for step in ticks):
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text class="tick x" x="{x}" y="{bottom + 18}">{step}</text>')
    return parts


def _name_ticks(chart: Chart, frame: Frame) -> list[str]:
    y = frame.height - frame.bottom + 16
    return [
        f'<text class="tick" transform="translate({frame.x(chart.step(index)) - 4:.1f} {y}) '
        f'rotate(30)">{escape(name)}</text>'
        for index, name in enumerate(chart.names)
    ]


def _grid(chart: Chart, frame: Frame, ticks: list[str]) -> list[str]:
    parts = []
    right, bottom = frame.width - frame.right, frame.height - frame.bottom
    for value in value_ticks(*frame.values, chart.axis):
        y, label = f"{frame.y(value):.1f}", tick_label(value, chart.axis)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick y" x="{frame.left - 8}" y="{y}">{label}</text>')
    for value, label in chart.rules:
        at = frame.y(value)
        parts.append(
            f'<line class="rule" x1="{frame.left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text class="tick rule-name" x="{right}" y="{at - 6:.1f}">{escape(label)}</text>'
        )
    axis = f'<line class="axis" x1="{frame.left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
    return [*parts, *ticks, axis]


def _curve(chart: Chart, line: Line, frame: Frame, *, width: float) -> list[str]:
    parts = []
    if line.raw:
        parts.append(f'<path class="raw {line.level}" d="{_path(chart, line.raw, frame)}"/>')
    parts.append(
        f'<path class="line {line.level}" stroke-width="{width:.1f}" '
        f'd="{_path(chart, line.values, frame)}"/>'
    )
    if chart.shape == "dots":
        radius = width / 2 + 1.5
        parts += [
            f'<circle class="dot {line.level}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>'
            for x, y in _points(chart, line.values, frame)
        ]
    for step in line.marks:
        x, y = frame.x(step), frame.y(line.values[step - chart.first_step])
        parts.append(
            f'<path class="mark {line.level}" d="M{x - 8:.1f} {y - 8:.1f}l16 16m0 -16l-16 16"/>'
        )
    return parts


def _path(chart: Chart, values: Sequence[float], frame: Frame) -> str:
    points = _points(chart, values, frame)
    if not points:
        return ""
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for x, y in points[1:]:
        path += f"H{x:.1f}V{y:.1f}" if chart.shape == "stairs" else f"L{x:.1f} {y:.1f}"
    return path


def _points(chart: Chart, values: Sequence[float], frame: Frame) -> list[tuple[float, float]]:
    stop = next((at for at, value in enumerate(values) if not math.isfinite(value)), len(values))
    return [(frame.x(chart.step(i)), frame.y(value)) for i, value in enumerate(values[:stop])]
