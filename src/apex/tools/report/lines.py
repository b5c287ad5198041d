"""Line charts: what they show, and where at each size; the page's template draws them as SVG."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from apex.tools.report.scales import (
    AROUND_ZERO,
    Axis,
    round_ticks,
    share,
    tick_label,
    value_range,
    value_ticks,
)

SIZES = {"wide": (960, 320), "narrow": (360, 260)}
"""Width and height of a chart on a wide screen and on a phone."""

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
        values: One for each of ``Chart.steps``; drawing stops at the first that is not finite.
        marks: Steps to mark with a cross.
        raw: Values to draw faintly behind the line, such as those before smoothing.
    """

    level: str
    values: tuple[float, ...]
    marks: tuple[int, ...] = ()
    raw: tuple[float, ...] = ()


@dataclass(frozen=True)
class Chart:
    """A chart, at any size.

    Attributes:
        title: Heading.
        caption: Explanation below the heading.
        label: Read aloud by screen readers.
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
    caption: str
    label: str
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

    @property
    def step_names(self) -> Sequence[str | int]:
        """The steps as the legend shows them."""
        return self.names or list(self.drawn_steps)

    @property
    def value_unit(self) -> str:
        """The unit of the values in the legend."""
        return " %" if self.axis in ("share", "relative") else ""

    @property
    def legend(self) -> dict[str, list[float | None]]:
        """Each level's values with three digits, for the legend; None for NaN and infinity."""
        factor = 100.0 if self.value_unit else 1.0
        shown = {
            line.level: line.values if self.axis in AROUND_ZERO else line.raw or line.values
            for line in self.lines
        }
        return {level: [_short(value * factor) for value in row] for level, row in shown.items()}

    @property
    def data(self) -> str:
        """The legend at every step as JSON, for the page's script."""
        values = {"steps": self.step_names, "values": self.legend, "unit": self.value_unit}
        return json.dumps(values)

    @property
    def pictures(self) -> list[Picture]:
        """The chart in each of ``SIZES``."""
        return [Picture(self, size) for size in SIZES]

    @property
    def value_ends(self) -> tuple[float, float]:
        """The ends of the value axis."""
        drawn = [value for value, _ in self.rules]
        drawn += [value for line in self.lines for value in line.values]
        if self.axis not in AROUND_ZERO:
            return value_range([*drawn, *(v for each in self.lines for v in each.raw)], self.axis)
        drawn += [end for ends in self.band for end in ends]
        return value_range([min(max(v, -self.limit), self.limit) for v in drawn], self.axis)


class Picture:
    """A chart at one of ``SIZES``: the coordinates of what the template draws.

    Attributes:
        chart: The chart.
        size: Name of the size, also the CSS class.
        named: Whether the steps' names are written below.
        width: Of the picture; ``height`` likewise.
        left: Edge of the plot area; ``right``, ``top`` and ``bottom`` likewise.
    """

    left, top = 50, 12

    def __init__(self, chart: Chart, size: str) -> None:
        self.chart, self.size = chart, size
        self.width, self.height = SIZES[size]
        self.named = 0 < len(chart.names) <= MOST_NAMES and self.width > NARROW
        if self.named:
            self.height += NAME_ROOM // 2
        longest = max(len(line.level) for line in chart.lines)
        names_room = NAME_ROOM - 14 if self.named else 14
        self.right = self.width - max(round(longest * LETTER) + 14, names_room)
        self.bottom = self.height - (NAME_ROOM if self.named else 30)
        self._steps = chart.drawn_steps[0], chart.drawn_steps[-1]
        self._ends = chart.value_ends

    def x(self, step: float) -> float:
        """Returns the horizontal coordinate of ``step``."""
        first, last = self._steps
        return self.left + (self.right - self.left) * (
            (step - first) / (last - first) if last > first else 0.5
        )

    def y(self, value: float) -> float:
        """Returns the vertical coordinate of ``value``, clamped to the plot area."""
        return self.bottom - (self.bottom - self.top) * share(value, *self._ends, self.chart.axis)

    @property
    def step_ticks(self) -> list[int]:
        """Round steps."""
        most = max(self.width // 90, 3)
        return [int(tick) for tick in round_ticks(*self._steps, most, least_gap=1.0)]

    @property
    def value_ticks(self) -> list[tuple[float, str, str]]:
        """Vertical coordinate, label and exponent of round values."""
        axis = self.chart.axis
        return [(self.y(v), *tick_label(v, axis)) for v in value_ticks(*self._ends, axis)]

    def points(self, values: Sequence[float]) -> list[tuple[float, float]]:
        """Returns the coordinates of ``values``, up to the first that is not finite."""
        finite = itertools.takewhile(math.isfinite, values)
        return [(self.x(s), self.y(v)) for v, s in zip(finite, self.chart.steps, strict=False)]

    def crosses(self, line: Line) -> list[tuple[float, float]]:
        """Returns the coordinates of a line's marks."""
        steps = self.chart.steps
        return [(self.x(s), self.y(line.values[steps.index(s)])) for s in line.marks]

    def path(self, values: Sequence[float]) -> str:
        """Returns the path through ``values``."""
        points = self.points(values)
        path = "".join(f"M{x:.1f} {y:.1f}" for x, y in points[:1])
        for x, y in points[1:]:
            path += f"H{x:.1f}V{y:.1f}" if self.chart.shape == "stairs" else f"L{x:.1f} {y:.1f}"
        return path

    @property
    def band(self) -> str:
        """The path around the band; empty without one."""
        ends = [
            (self.x(step), self.y(low), self.y(high))
            for step, (low, high) in zip(self.chart.steps, self.chart.band, strict=False)
            if math.isfinite(low) and math.isfinite(high)
        ]
        if len(ends) < 2:
            return ""
        there = "L".join(f"{x:.1f} {high:.1f}" for x, _, high in ends)
        back = "L".join(f"{x:.1f} {low:.1f}" for x, low, _ in reversed(ends))
        return f"M{there}L{back}Z"

    def stroke(self, place: int) -> float:
        """Returns a line's width; the first is the widest, so that coinciding ones are visible."""
        count = len(self.chart.lines)
        return 2.0 if count == 1 else 5.0 - 3.0 * place / (count - 1)

    @property
    def labels(self) -> list[tuple[str, float, float, float]]:
        """Each line's level and end, and the height of its label, apart from the others'."""
        ends: dict[float, list[tuple[float, str]]] = {}
        for line in self.chart.lines:
            for x, y in self.points(line.values)[-1:]:
                ends.setdefault(x, []).append((y, line.level))
        found = []
        for x, labels in ends.items():
            labels.sort()
            places = spread_out([y for y, _ in labels], LABEL_GAP, self.top, self.bottom)
            found += [(name, x, y, at) for (y, name), at in zip(labels, places, strict=True)]
        return found


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


def _short(value: float) -> float | None:
    """Returns ``value`` with three digits; None for NaN and infinity, which JSON lacks."""
    if not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() else float(f"{value:.3g}")
