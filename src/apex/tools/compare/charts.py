"""The curves of a comparison, in percent of a chart's width and height."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from apex.tools.compare.results import BASELINE, Comparison
from apex.tools.compare.soundness import LEAST_ERRORS, LEAST_WINDOW, MOST_EXCESS, excess

_DECAY = 0.8
"""Of a running mean, per step."""

_MOST_SHOWN = 20.0
"""Largest difference from fp32's loss that a chart shows, in percent."""


class Point(NamedTuple):
    """A value after a step, counted from 1, and how far its band reaches to either side."""

    step: int
    value: float
    spread: float = 0.0


class Line(NamedTuple):
    """One level's curve and the band around it, as paths of SVG."""

    level: str
    path: str
    band: str


class Chart(NamedTuple):
    """A line chart; ticks and the grey area's edges in percent, from the left and the top."""

    title: str
    caption: str
    lines: list[Line]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    area: tuple[float, float]


def charts(comparison: Comparison) -> list[Chart]:
    """Returns the charts that have anything to draw: the loss, and its difference from fp32's."""
    losses = {}
    for result in comparison.results:
        if result.training is not None and not result.emulated:
            losses[result.name] = result.training.losses
    fp32 = losses.get(BASELINE, ())
    loss = {level: _running_mean(values) for level, values in losses.items()}
    apart = {level: _apart(losses[level], fp32) for level in losses if level != BASELINE}
    found = [
        _chart("Training loss", "Running mean of each level's loss.", loss),
        _chart(
            "Loss, difference from fp32 in %",
            "Mean difference on the same batches over the last third of the steps until then, and "
            f"{LEAST_ERRORS:g} standard errors to either side. The curve of a level that trains "
            "worse ends above the grey area, and its band above 0.",
            apart,
            most=_MOST_SHOWN,
            area=100 * MOST_EXCESS,
        ),
    ]
    return [chart for chart in found if chart is not None]


def _running_mean(values: Sequence[float]) -> list[Point]:
    """Returns the exponential moving average, unbiased at its start, while it is finite."""
    mean = weight = 0.0
    points: list[Point] = []
    for step, value in enumerate(values, start=1):
        if not math.isfinite(value):
            break
        mean = _DECAY * mean + (1 - _DECAY) * value
        weight = _DECAY * weight + (1 - _DECAY)
        points.append(Point(step, mean / weight))
    return points


def _apart(losses: Sequence[float], fp32: Sequence[float]) -> list[Point]:
    """Returns the mean paired difference in percent, as it is judged, while losses are finite."""
    points: list[Point] = []
    for step in range(LEAST_WINDOW, len(losses) + 1):
        found = excess(losses[:step], fp32)
        if found is None or not math.isfinite(losses[step - 1]):
            break
        points.append(Point(step, 100 * found.share, 100 * LEAST_ERRORS * found.share_error))
    return points


def _chart(
    title: str,
    caption: str,
    curves: Mapping[str, Sequence[Point]],
    most: float = math.inf,
    area: float = 0.0,
) -> Chart | None:
    """Returns a chart of curves; None if no curve has two points.

    Values of a size above ``most`` leave it. The grey area reaches as far as ``area`` around 0.
    """
    curves = {level: points for level, points in curves.items() if len(points) > 1}
    if not curves:
        return None
    values = [point.value for points in curves.values() for point in points]
    values += [-2 * area, 2 * area] if area else []
    low, high = max(min(values), -most), min(max(values), most)
    margin = 0.05 * (high - low) or abs(high) or 1.0
    low, high = low - margin, high + margin
    steps = max(points[-1].step for points in curves.values())

    def x(step: float) -> float:
        return 100 * (step - 1) / (steps - 1)

    def y(value: float) -> float:
        return 100 * (high - min(max(value, low), high)) / (high - low)

    lines = []
    for level, points in curves.items():
        line = [(x(step), y(value)) for step, value, _ in points]
        above = [(x(step), y(value + spread)) for step, value, spread in points]
        below = [(x(step), y(value - spread)) for step, value, spread in reversed(points)]
        lines.append(Line(level, _path(line), _path(above + below)))
    return Chart(
        title,
        caption,
        lines,
        x_ticks=[(x(step), f"{step:g}") for step in round_ticks(1, steps, least_gap=1.0)],
        y_ticks=[(y(value), f"{value:g}") for value in round_ticks(low, high)],
        area=(y(area), y(-area)),
    )


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in points)


def round_ticks(low: float, high: float, most: int = 7, least_gap: float = 0.0) -> list[float]:
    """Returns at most ``most`` round values in ``low`` to ``high``, ``least_gap`` apart or more."""
    power = math.floor(math.log10((high - low) or 1.0)) - 1
    while True:
        for factor in (1, 2, 5):
            gap = factor * 10.0**power
            first, last = math.ceil(low / gap), math.floor(high / gap)
            if gap >= least_gap and last - first < most:
                return [float(f"{index * gap:.9g}") for index in range(first, last + 1)]
        power += 1
