"""The charts: losses, distance module by module, frozen updates, loss scales."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from apex.debug.rendering.formatting import place
from apex.tools.report.lines import Chart, Line, Picture, picture, smooth
from apex.tools.report.scales import AROUND_ZERO
from apex.tools.results import Comparison, Result, Training
from apex.tools.variants import BASELINE

SIZES = {"wide": (960, 320), "narrow": (360, 260)}
"""Width and height of a chart on a wide screen and on a phone."""

NOISES_SHOWN = 6
"""Largest difference from fp32 that is shown, in its noise; a diverging level leaves the chart."""


@dataclass(frozen=True)
class CurveFigure:
    """A chart with a title.

    Attributes:
        title: Heading.
        caption: Explanation below the heading.
        data: Steps and values as JSON, for the legend under the pointer.
        unit: What a step is.
        last_step: Step that the legend shows at first.
        final: Value of each level at that step.
        pictures: The chart in each of ``SIZES``.
    """

    title: str
    caption: str
    data: str
    unit: str
    last_step: str
    final: dict[str, str]
    pictures: tuple[Picture, ...]


def curve_figures(comparison: Comparison) -> list[CurveFigure]:
    """Returns the figures that have data to show."""
    figures = (_differences, _losses, _first_losses, _modules, _frozen, _loss_scales)
    return [figure for draw in figures if (figure := draw(comparison)) is not None]


def _differences(comparison: Comparison) -> CurveFigure | None:
    records = {name: r.losses for name, r, emulated in _records(comparison) if not emulated}
    fp32 = records.pop(BASELINE, ())
    records = {name: losses for name, losses in records.items() if len(losses) == len(fp32)}
    if not records:
        return None
    mean = smooth(fp32)
    relative = min(mean, default=0.0) > 0
    sizes = mean if relative else (1.0,) * len(mean)
    noise = [
        math.sqrt(square)
        for square in smooth(
            [((x - m) / s) ** 2 for x, m, s in zip(fp32, mean, sizes, strict=True)]
        )
    ]
    lines = tuple(
        Line(name, _apart(smooth(losses), mean, sizes), raw=_apart(losses, fp32, sizes))
        for name, losses in records.items()
    )
    largest = max((value for value in noise if math.isfinite(value)), default=0.0)
    return _figure(
        "Loss, difference from fp32",
        "Running mean of each level's loss minus fp32's"
        + (", in percent of it" if relative else "")
        + "; thin: every step. The band is fp32's own noise, one standard deviation of its loss "
        "around its running mean: a curve inside it is closer to fp32 than fp32's steps are to one "
        "another.",
        Chart(
            "Difference of each level's loss from fp32",
            lines,
            axis="relative" if relative else "difference",
            rules=((0.0, "fp32"),),
            band=tuple((-value, value) for value in noise),
            limit=NOISES_SHOWN * largest or math.inf,
        ),
    )


def _apart(
    losses: Sequence[float], fp32: Sequence[float], sizes: Sequence[float]
) -> tuple[float, ...]:
    """Returns the differences of two curves in units of ``sizes``."""
    return tuple((x - y) / size for x, y, size in zip(losses, fp32, sizes, strict=True))


def _losses(comparison: Comparison) -> CurveFigure | None:
    records = [(name, record) for name, record, emulated in _records(comparison) if not emulated]
    if not records:
        return None
    lines = tuple(Line(name, smooth(r.losses), raw=r.losses) for name, r in records)
    return _figure(
        "Training loss",
        "Thin: every step. Bold: the running mean.",
        Chart("Training loss of each level", lines),
    )


def _first_losses(comparison: Comparison) -> CurveFigure | None:
    records = _records(comparison)
    few = max((len(record.losses) for _, record, emulated in records if emulated), default=0)
    if not few or len(records) < 2:
        return None
    lines = tuple(Line(name, record.losses[:few]) for name, record, _ in records)
    return _figure(
        f"The first {few} steps",
        "All levels, including emulated ones. A step skipped because of the high initial loss "
        "scale puts a curve one step behind.",
        Chart(f"Training loss of all levels in the first {few} steps", lines),
    )


def _modules(comparison: Comparison) -> CurveFigure | None:
    base = comparison.baseline
    probed = [(r.name, r.probe) for r in comparison.results if r.probe and r.name != base.name]
    probed = [(name, probe) for name, probe in probed if probe.modules]
    if not probed:
        return None
    names = tuple(
        f"{module.name} {module.kind}" if module.name else place(module.name)
        for module in probed[0][1].modules
    )
    low = min(
        (m.error for _, probe in probed for m in probe.modules if 0 < m.error < math.inf),
        default=1.0,
    )
    lines = tuple(
        Line(name, tuple(max(module.error, low) for module in probe.modules))
        for name, probe in probed
    )
    rules = {
        result.probe.eps: f"eps of {result.variant.short_dtype}"
        for result in comparison.results
        if result.probe is not None and result.name != base.name
    }
    return _figure(
        "Distance from fp32, module by module",
        "Relative distance of each module's output from fp32, on one batch with the final fp32 "
        "weights, in forward order. Points above the eps line of their dtype differ from fp32 by "
        "more than one rounding.",
        Chart(
            "Distance of each module's output from fp32",
            lines,
            shape="dots",
            rules=tuple(rules.items()),
            unit="module",
            names=names,
        ),
    )


def _frozen(comparison: Comparison) -> CurveFigure | None:
    sampled = [(name, r.frozen) for name, r, emulated in _records(comparison) if not emulated]
    sampled = [(name, samples) for name, samples in sampled if samples]
    if not sampled or len(sampled[0][1]) < 2:
        return None
    steps = tuple(step for step, _ in sampled[0][1])
    lines = tuple(
        Line(name, tuple(share for _, share in samples))
        for name, samples in sampled
        if tuple(step for step, _ in samples) == steps
    )
    return _figure(
        "Frozen updates",
        "Share of the weights whose update in a step was lost, because it was smaller than half "
        "the weight's rounding step. fp32 masters prevent this.",
        Chart(
            "Share of updates lost to rounding",
            lines,
            axis="share",
            shape="dots",
            steps=steps,
        ),
    )


def _loss_scales(comparison: Comparison) -> CurveFigure | None:
    scaled = [
        (name, record)
        for name, record, _ in _records(comparison)
        if len(set(record.loss_scales)) > 1 or record.loss_scales[0] != 1
    ]
    if not scaled:
        return None
    skips = sum(len(record.skipped) for _, record in scaled)
    found = {0: "No step overflowed.", 1: "A cross marks the skipped step."}.get(
        skips, f"Crosses mark the {skips} skipped steps."
    )
    return _figure(
        "Loss scale",
        "Scaling the loss keeps fp16 gradients from underflowing; when they overflow, the step is "
        f"skipped and the scale is halved. {found} Levels not shown use a scale of 1.",
        Chart(
            "Loss scale of each level with loss scaling",
            tuple(Line(name, r.loss_scales, marks=r.skipped) for name, r in scaled),
            axis="log2",
            shape="stairs",
            steps=range(sys.maxsize),
        ),
    )


def _records(comparison: Comparison) -> list[tuple[str, Training, bool]]:
    """Returns name, record and whether the dtype is emulated, for each variant that trained."""
    results: Sequence[Result] = comparison.results
    return [(r.name, r.training, r.emulated) for r in results if r.training is not None]


def _figure(title: str, caption: str, chart: Chart) -> CurveFigure:
    factor, unit = (100.0, " %") if chart.axis in ("share", "relative") else (1.0, "")

    def shown(line: Line) -> Sequence[float]:
        return line.values if chart.axis in AROUND_ZERO else line.raw or line.values

    values = {line.level: [_short(value * factor) for value in shown(line)] for line in chart.lines}
    steps: Sequence[str | int] = chart.names or list(chart.drawn_steps)
    return CurveFigure(
        title,
        caption,
        data=json.dumps({"steps": steps, "values": values, "unit": unit}),
        unit=chart.unit,
        last_step=str(steps[-1]),
        final={
            level: "-" if numbers[-1] is None else f"{numbers[-1]:g}{unit}"
            for level, numbers in values.items()
        },
        pictures=tuple(
            picture(chart, width=width, height=height, kind=kind)
            for kind, (width, height) in SIZES.items()
        ),
    )


def _short(value: float) -> float | None:
    """Returns ``value`` with three digits; None for NaN and infinity, which JSON lacks."""
    if not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() else float(f"{value:.3g}")
