"""The curves of a comparison and their axes; the template of the report draws them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from apex.tools.compare.results import BASELINE, Comparison
from apex.tools.compare.soundness import LEAST_ERRORS, LEAST_WINDOW, MOST_EXCESS, excess
from apex.tools.compare.training import end_loss

_MOST_SHOWN = 20.0
"""Largest difference from fp32's loss that a chart shows, in percent."""


class Point(NamedTuple):
    """A value after a step, counted from 1, and how far its band reaches to either side."""

    step: int
    value: float
    spread: float = 0.0


class Chart(NamedTuple):
    """A line chart: each level's curve, the ends of both axes, and round values on them.

    The grey area reaches as far as ``area`` to either side of 0.
    """

    title: str
    caption: str
    curves: Mapping[str, Sequence[Point]]
    steps: int
    low: float
    high: float
    x_ticks: list[float]
    y_ticks: list[float]
    area: float


def charts(comparison: Comparison) -> list[Chart]:
    """Returns the charts that have anything to draw: the loss, and its difference from fp32's."""
    losses = {}
    for result in comparison.results:
        if result.training is not None:
            losses[result.name] = result.training.losses
    fp32 = losses.get(BASELINE, ())
    loss = {level: _loss(values) for level, values in losses.items()}
    apart = {level: _apart(values, fp32) for level, values in losses.items() if level != BASELINE}
    found = [
        _chart("Training loss", "Mean over the last steps until then.", loss),
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


def _loss(losses: Sequence[float]) -> list[Point]:
    """Returns the mean loss, as the table has it at the end, while losses are finite."""
    points: list[Point] = []
    for step, loss in enumerate(losses, start=1):
        if not math.isfinite(loss):
            break
        points.append(Point(step, end_loss(losses[:step])))
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
    points: list[Point] = []
    for curve in curves.values():
        points += curve
    steps = max(point.step for point in points)
    values = [-2 * area, 2 * area] if area else []
    values += [point.value for point in points]
    low = max(min(values), -most)
    high = min(max(values), most)
    margin = 0.05 * (high - low) or abs(high) or 1.0
    low -= margin
    high += margin
    x_ticks = [step for step in _round_values(1, steps) if step.is_integer()]
    y_ticks = _round_values(low, high)
    return Chart(title, caption, curves, steps, low, high, x_ticks, y_ticks, area)


def _round_values(low: float, high: float) -> list[float]:
    """Returns three to seven values between two others, the same round gap apart."""
    power = 10.0 ** math.floor(math.log10(high - low))
    for factor in (0.2, 0.5, 1, 2):
        gap = factor * power
        first = math.ceil(low / gap)
        last = math.floor(high / gap)
        if last - first < 7:
            break
    return [float(f"{index * gap:.9g}") for index in range(first, last + 1)]
