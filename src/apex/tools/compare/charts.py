"""Prepares the curves of a comparison and their axes, which the report's template draws."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from apex.tools.compare.results import BASELINE, Comparison
from apex.tools.compare.soundness import LEAST_ERRORS, LEAST_WINDOW, MOST_EXCESS, excess
from apex.tools.compare.training import end_loss

_MOST_SHOWN = 20.0
"""Largest difference from fp32's loss that a chart shows, in percent."""


class Point(NamedTuple):
    """A value after a step, counted from 1, and half the width of its band."""

    step: int
    value: float
    spread: float = 0.0


class Chart(NamedTuple):
    """A line chart: each level's curve, and the ends of both axes.

    The grey area extends from ``-area`` to ``area``.
    """

    title: str
    caption: str
    curves: Mapping[str, Sequence[Point]]
    low: float
    high: float
    area: float


def charts(comparison: Comparison) -> list[Chart]:
    """Returns the charts of the loss and of its difference from fp32's, without empty ones."""
    losses: dict[str, Sequence[float]] = {}
    for result in comparison.results:
        if result.training is not None:  # up to a loss that is not finite
            finite = itertools.takewhile(math.isfinite, result.training.losses)
            losses[result.name] = list(finite)
    means = {level: _mean_losses(values) for level, values in losses.items()}
    fp32 = losses.pop(BASELINE)
    differences = {level: _differences(values, fp32) for level, values in losses.items()}
    return [
        *_chart("Training loss", "Mean over the last steps until then.", means),
        *_chart(
            "Loss, difference from fp32 in %",
            "Mean difference on the same batches over the last third of the steps until then, and "
            f"{LEAST_ERRORS:g} standard errors to either side. The curve of a level that trains "
            "worse ends above the grey area, and its band above 0.",
            differences,
            most=_MOST_SHOWN,
            area=100 * MOST_EXCESS,
        ),
    ]


def _mean_losses(losses: Sequence[float]) -> list[Point]:
    """Returns the table's final loss for each number of steps."""
    return [Point(step, end_loss(losses[:step])) for step in range(1, len(losses) + 1)]


def _differences(losses: Sequence[float], fp32: Sequence[float]) -> list[Point]:
    """Returns the mean paired difference in percent."""
    points = []
    steps = min(len(losses), len(fp32))
    for step in range(LEAST_WINDOW, steps + 1):
        difference = excess(losses[:step], fp32)
        if difference is not None:
            percent = 100 * difference.share
            spread = 100 * LEAST_ERRORS * difference.share_error
            points.append(Point(step, percent, spread))
    return points


def _chart(
    title: str,
    caption: str,
    curves: Mapping[str, Sequence[Point]],
    most: float = math.inf,
    area: float = 0.0,
) -> Iterator[Chart]:
    """Yields a chart of the curves that have at least two points; nothing without such curves.

    The vertical axis shows no value outside ``-most`` to ``most``.
    """
    drawn = {}
    values: list[float] = []
    for level, points in curves.items():
        if len(points) > 1:
            drawn[level] = points
            values += [point.value for point in points]
    if not drawn:
        return
    if area:
        values += [-2 * area, 2 * area]
    low = max(min(values), -most)
    high = min(max(values), most)
    margin = 0.05 * (high - low)
    if margin == 0.0:  # all values are equal
        margin = max(1.0, 0.05 * abs(high))
    yield Chart(title, caption, drawn, low - margin, high + margin, area)


def round_values(low: float, high: float) -> list[float]:
    """Returns three to seven evenly spaced round values between two others."""
    power = 10.0 ** math.floor(math.log10(high - low))
    for factor in (0.2, 0.5, 1, 2):
        gap = factor * power
        first = math.ceil(low / gap)
        last = math.floor(high / gap)
        if last - first < 7:
            break
    # Through text, because 3 * 0.2, for example, is 0.6000000000000001.
    return [float(f"{index * gap:.9g}") for index in range(first, last + 1)]
