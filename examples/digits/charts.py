"""Line charts as inline SVG, with a logarithmic y axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One level's curve.

    Attributes:
        level: Its name, also the CSS class that colours it.
        values: One per step, the first at ``Chart.first_step``; the curve ends at the first value
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
        base: Of the y axis: 10 for losses, 2 for loss scales.
        shape: "line" joins the values, "stairs" holds each until the next.
        first_step: The step of every line's first value.
    """

    title: str
    lines: tuple[Line, ...]
    base: Literal[2, 10] = 10
    shape: Literal["line", "stairs"] = "line"
    first_step: int = 1


@dataclass(frozen=True)
class Frame:
    """Maps steps and values to the coordinates of a picture ``width`` by ``height``."""

    width: int
    height: int
    steps: tuple[int, int]
    values: tuple[float, float]
    left: int = 46
    right: int = 14
    top: int = 12
    bottom: int = 30

    def x(self, step: float) -> float:
        """Returns the horizontal coordinate of ``step``."""
        first, last = self.steps
        share = (step - first) / max(last - first, 1)
        return self.left + share * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        """Returns the vertical coordinate of ``value``, at the edge if it lies outside."""
        low, high = (math.log(end) for end in self.values)
        share = (math.log(min(max(value, self.values[0]), self.values[1])) - low) / (high - low)
        return self.height - self.bottom - share * (self.height - self.top - self.bottom)


def svg(chart: Chart, *, width: int, height: int, kind: str) -> str:
    """Returns ``chart`` as one SVG element of class ``kind``."""
    last = chart.first_step + max(len(line.values) for line in chart.lines) - 1
    frame = Frame(width, height, (chart.first_step, last), _value_range(chart))
    parts = _grid(chart, frame)
    for place, line in enumerate(chart.lines):
        # The first is broad and pale, so that it shows where the others cover it.
        parts += _curve(chart, line, frame, kind="line" if place else "line broad")
    bottom = frame.height - frame.bottom
    return (
        f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{chart.title}" data-left="{frame.left}" '
        f'data-right="{width - frame.right}" data-first="{chart.first_step}" data-last="{last}">'
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


def step_ticks(first: int, last: int, most: int) -> list[int]:
    """Returns at most ``most`` round steps between ``first`` and ``last``."""
    for power in range(8):
        for factor in (1, 2, 5):
            gap = factor * 10**power
            ticks = list(range(math.ceil(first / gap) * gap, last + 1, gap))
            if len(ticks) <= most:
                return ticks
    return [first, last]


def value_ticks(low: float, high: float, base: int, most: int = 6) -> list[float]:
    """Returns round values between ``low`` and ``high``, even on a logarithmic axis."""
    powers = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    decades = [float(base) ** power for power in powers]
    fine = [decade * factor for decade in decades for factor in ((1, 2, 5) if base == 10 else (1,))]
    inside = [value for value in fine if low <= value <= high]
    if len(inside) <= most:
        return inside
    inside = [value for value in decades if low <= value <= high]
    return inside[:: math.ceil(len(inside) / most)]


def _value_range(chart: Chart) -> tuple[float, float]:
    values = [
        value
        for line in chart.lines
        for value in (*line.values, *line.raw)
        if math.isfinite(value) and value > 0
    ] or [1.0]
    margin = 2.0 if chart.base == 2 else 1.15
    return min(values) / margin, max(values) * margin


def _grid(chart: Chart, frame: Frame) -> list[str]:
    parts = []
    right, bottom = frame.width - frame.right, frame.height - frame.bottom
    for value in value_ticks(*frame.values, chart.base):
        y, label = f"{frame.y(value):.1f}", _label(value, chart)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick y" x="{frame.left - 8}" y="{y}">{label}</text>')
    for step in step_ticks(*frame.steps, most=max(frame.width // 90, 3)):
        x = f"{frame.x(step):.1f}"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text class="tick x" x="{x}" y="{bottom + 18}">{step}</text>')
    parts.append(f'<text class="tick y" x="{frame.left - 8}" y="{bottom + 14}">step</text>')
    parts.append(f'<line class="axis" x1="{frame.left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    return parts


def _label(value: float, chart: Chart) -> str:
    if chart.base == 10:
        return f"{value:g}"
    return f'2<tspan class="power" dy="-5">{round(math.log2(value))}</tspan>'


def _curve(chart: Chart, line: Line, frame: Frame, *, kind: str) -> list[str]:
    parts = []
    if line.raw:
        parts.append(f'<path class="raw {line.level}" d="{_path(chart, line.raw, frame)}"/>')
    parts.append(f'<path class="{kind} {line.level}" d="{_path(chart, line.values, frame)}"/>')
    for step in line.marks:
        value = line.values[step - chart.first_step]
        x, y = frame.x(step), frame.y(value)
        parts.append(
            f'<path class="mark {line.level}" d="M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10"/>'
        )
    return parts


def _path(chart: Chart, values: Sequence[float], frame: Frame) -> str:
    points = [
        (frame.x(step), frame.y(value))
        for step, value in enumerate(_finite(values), start=chart.first_step)
    ]
    if not points:
        return ""
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for x, y in points[1:]:
        path += f"H{x:.1f}V{y:.1f}" if chart.shape == "stairs" else f"L{x:.1f} {y:.1f}"
    return path


def _finite(values: Sequence[float]) -> list[float]:
    stop = next((at for at, value in enumerate(values) if not math.isfinite(value)), len(values))
    return list(values[:stop])
