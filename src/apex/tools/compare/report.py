"""A comparison as one self-contained HTML page: verdicts, two tables with bars, two charts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from apex.tools.compare.columns import COLUMNS
from apex.tools.compare.results import BASELINE, Comparison, Result
from apex.tools.compare.table import NOTHING, Row, footnote, rows

GAIN_COLUMNS = ("level", "time", "speed", "memory", "stored", "saved", "verdict")
TRAINING_COLUMNS = ("level", "loss", "evaluation", "distance", "skipped", "frozen")

_DECAY = 0.8
"""Of a running mean, per step."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 860.0, 12.0, 280.0
"""Edges of the plot area, in a picture of 960 x 310."""

_LABEL_GAP = 14.0


class Line(NamedTuple):
    """One level's curve: its path, and where its name stands at its end."""

    level: str
    path: str
    x: float
    y: float


class Chart(NamedTuple):
    """A line chart: coordinates for the template."""

    title: str
    caption: str
    lines: list[Line]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    band: str


def report(comparison: Comparison) -> str:
    """Returns the page as HTML; the same comparison gives the same page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("apex.tools.compare", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    cells = rows(comparison)
    return environment.get_template("report.html.jinja").render(
        comparison=comparison,
        tables=[
            ("Time and memory", _table(GAIN_COLUMNS, cells)),
            ("Training", _table(TRAINING_COLUMNS, cells)),
        ],
        bars=_bars([result for result, _ in cells]),
        charts=charts(comparison),
        footnote=footnote(comparison),
    )


def _table(names: Sequence[str], cells: list[tuple[Result, Row]]) -> dict[str, Any]:
    shown = [name for name in names if any(row[name] != NOTHING for _, row in cells)]
    return {"columns": {name: COLUMNS[name] for name in shown}, "rows": cells}


def _bars(results: Sequence[Result]) -> dict[tuple[str, str], float]:
    """Returns the length of the bar, from 0 to 100, of each level and column that has one."""
    trained = {r.name: r.training for r in results if r.training is not None}
    timed = {r.name: r.timing for r in results if r.timing is not None and not r.emulated}
    values: dict[str, dict[str, float]] = {  # emulated times would shrink the others to nothing
        "time": {name: timing.median for name, timing in timed.items()},
        "memory": {r.name: r.memory for r in results if r.memory},
        "stored": {name: record.stored.per_param for name, record in trained.items()},
        "saved": {name: record.saved_bytes for name, record in trained.items()},
    }
    return {
        (name, column): 100 * value / (max(found.values(), default=0) or 1)
        for column, found in values.items()
        for name, value in found.items()
    }


def charts(comparison: Comparison) -> list[Chart]:
    """Returns the charts that have anything to draw: the loss, and its difference from fp32's."""
    losses = {
        r.name: r.training.losses
        for r in comparison.results
        if r.training is not None and not r.emulated
    }
    fp32 = losses.get(BASELINE, ())
    mean = smooth(fp32)
    apart = {
        name: [a - b for a, b in zip(smooth(own), mean, strict=True)]
        for name, own in losses.items()
        if name != BASELINE and len(own) == len(fp32)
    }
    noise = [math.sqrt(v) for v in smooth([(a - b) ** 2 for a, b in zip(fp32, mean, strict=True)])]
    found = (
        _chart(
            "Training loss",
            "Running mean of each level's loss.",
            {name: smooth(own) for name, own in losses.items()},
        ),
        _chart(
            "Loss, difference from fp32",
            "Running mean of each level's loss minus fp32's. The band is fp32's own noise, one "
            "standard deviation of its loss around its running mean: a curve inside it is closer "
            "to fp32 than fp32's steps are to one another.",
            apart,
            noise,
        ),
    )
    return [chart for chart in found if chart is not None]


def _chart(
    title: str, caption: str, curves: Mapping[str, Sequence[float]], noise: Sequence[float] = ()
) -> Chart | None:
    """Returns a chart of curves up to their first value that is not finite; None of no line."""
    drawn = {level: [*itertools.takewhile(math.isfinite, own)] for level, own in curves.items()}
    drawn = {level: own for level, own in drawn.items() if len(own) > 1}
    if not drawn:
        return None
    band = [*itertools.takewhile(math.isfinite, noise)]
    limit = 6 * max(band, default=math.inf) or math.inf  # a diverging level leaves the chart
    values = [v for own in drawn.values() for v in own if abs(v) <= limit]
    values += band + [-v for v in band]
    low, high, steps = min(values), max(values), max(map(len, drawn.values()))
    margin = 0.05 * (high - low) or abs(high) or 1.0
    low, high = low - margin, high + margin

    def x(step: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (step - 1) / (steps - 1)

    def y(value: float) -> float:
        share = (min(max(value, low), high) - low) / (high - low)
        return _BOTTOM - (_BOTTOM - _TOP) * share

    def path(points: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in points)

    edge = [*enumerate(band, 1)]
    around = edge + [(step, -value) for step, value in reversed(edge)]
    names = _apart(sorted((y(own[-1]), level) for level, own in drawn.items()))
    return Chart(
        title,
        caption,
        [
            Line(level, path([*enumerate(own, 1)]), x(len(own)), names[level])
            for level, own in drawn.items()
        ],
        [(x(step), f"{step:g}") for step in round_ticks(1, steps, least_gap=1.0)],
        [(y(value), f"{value:g}") for value in round_ticks(low, high)],
        f"{path(around)}Z" if band else "",
    )


def _apart(ends: Sequence[tuple[float, str]]) -> dict[str, float]:
    """Returns ascending heights moved apart, so that labels do not overlap, within the picture."""
    found: dict[str, float] = {}
    place = -math.inf
    for y, level in ends:
        place = found[level] = max(y, place + _LABEL_GAP)
    beyond = max(0.0, place - _BOTTOM)
    return {level: y - beyond for level, y in found.items()}


def smooth(values: Sequence[float]) -> list[float]:
    """Returns the exponential moving average, unbiased at its start."""
    mean, weight, means = 0.0, 0.0, []
    for value in values:
        mean = _DECAY * mean + (1 - _DECAY) * value
        weight = _DECAY * weight + (1 - _DECAY)
        means.append(mean / weight)
    return means


def round_ticks(low: float, high: float, most: int = 7, least_gap: float = 0.0) -> list[float]:
    """Returns at most ``most`` round values in ``low`` to ``high``, ``least_gap`` apart or more."""
    power = math.floor(math.log10((high - low) or 1.0)) - 1
    gaps = (factor * 10.0**p for p in itertools.count(power) for factor in (1, 2, 5))
    ends = ((math.ceil(low / gap), math.floor(high / gap), gap) for gap in gaps if gap >= least_gap)
    first, last, gap = next(each for each in ends if each[1] - each[0] < most)
    return [float(f"{index * gap:.9g}") for index in range(first, last + 1)]
