"""The charts: losses, distance module by module, frozen updates, loss scales."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from apex.debug.rendering.formatting import place
from apex.tools.report.lines import Chart, Line, smooth
from apex.tools.results import Comparison, Training
from apex.tools.variants import BASELINE

NOISES_SHOWN = 6
"""Largest difference from fp32 that is shown, in its noise; a diverging level leaves the chart."""


def charts(comparison: Comparison) -> list[Chart]:
    """Returns the charts that have data to show."""
    makers = (_differences, _losses, _first_losses, _modules, _frozen, _loss_scales)
    return [chart for make in makers if (chart := make(comparison)) is not None]


def _differences(comparison: Comparison) -> Chart | None:
    records = {name: record.losses for name, record in _native(comparison).items()}
    fp32 = records.pop(BASELINE, ())
    records = {name: losses for name, losses in records.items() if len(losses) == len(fp32)}
    if not records:
        return None
    mean = smooth(fp32)
    relative = min(mean, default=0.0) > 0
    sizes = mean if relative else (1.0,) * len(mean)
    noise = [math.sqrt(square) for square in smooth([x**2 for x in _apart(fp32, mean, sizes)])]
    largest = max((value for value in noise if math.isfinite(value)), default=0.0)
    return Chart(
        title="Loss, difference from fp32",
        caption="Running mean of each level's loss minus fp32's"
        + (", in percent of it" if relative else "")
        + "; thin: every step. The band is fp32's own noise, one standard deviation of its loss "
        "around its running mean: a curve inside it is closer to fp32 than fp32's steps are to one "
        "another.",
        label="Difference of each level's loss from fp32",
        lines=tuple(
            Line(name, _apart(smooth(losses), mean, sizes), raw=_apart(losses, fp32, sizes))
            for name, losses in records.items()
        ),
        axis="relative" if relative else "difference",
        rules=((0.0, "fp32"),),
        band=tuple((-value, value) for value in noise),
        limit=NOISES_SHOWN * largest or math.inf,
    )


def _apart(
    losses: Sequence[float], fp32: Sequence[float], sizes: Sequence[float]
) -> tuple[float, ...]:
    """Returns the differences of two curves in units of ``sizes``."""
    return tuple((x - y) / size for x, y, size in zip(losses, fp32, sizes, strict=True))


def _losses(comparison: Comparison) -> Chart | None:
    records = _native(comparison)
    if not records:
        return None
    return Chart(
        title="Training loss",
        caption="Thin: every step. Bold: the running mean.",
        label="Training loss of each level",
        lines=tuple(Line(name, smooth(r.losses), raw=r.losses) for name, r in records.items()),
    )


def _first_losses(comparison: Comparison) -> Chart | None:
    records, native = _records(comparison), _native(comparison)
    few = max((len(r.losses) for name, r in records.items() if name not in native), default=0)
    if not few or len(records) < 2:
        return None
    return Chart(
        title=f"The first {few} steps",
        caption="All levels, including emulated ones. A step skipped because of the high initial "
        "loss scale puts a curve one step behind.",
        label=f"Training loss of all levels in the first {few} steps",
        lines=tuple(Line(name, record.losses[:few]) for name, record in records.items()),
    )


def _modules(comparison: Comparison) -> Chart | None:
    levels = [result for result in comparison.results if result.name != BASELINE]
    rules = {r.probe.eps: f"eps of {r.variant.short_dtype}" for r in levels if r.probe}
    errors = {r.name: r.probe.modules for r in levels if r.probe and r.probe.modules}
    if not errors:
        return None
    found = [module.error for modules in errors.values() for module in modules]
    low = min((error for error in found if 0 < error < math.inf), default=1.0)
    return Chart(
        title="Distance from fp32, module by module",
        caption="Relative distance of each module's output from fp32, on one batch with the final "
        "fp32 weights, in forward order. Points above the eps line of their dtype differ from fp32 "
        "by more than one rounding.",
        label="Distance of each module's output from fp32",
        lines=tuple(
            Line(name, tuple(max(module.error, low) for module in modules))
            for name, modules in errors.items()
        ),
        shape="dots",
        rules=tuple(rules.items()),
        unit="module",
        names=tuple(
            f"{module.name} {module.kind}" if module.name else place(module.name)
            for module in next(iter(errors.values()))
        ),
    )


def _frozen(comparison: Comparison) -> Chart | None:
    sampled = {name: dict(r.frozen) for name, r in _native(comparison).items() if r.frozen}
    steps = tuple(next(iter(sampled.values()), {}))
    if len(steps) < 2:
        return None
    return Chart(
        title="Frozen updates",
        caption="Share of the weights whose update in a step was lost, because it was smaller than "
        "half the weight's rounding step. fp32 masters prevent this.",
        label="Share of updates lost to rounding",
        lines=tuple(
            Line(name, tuple(shares.values()))
            for name, shares in sampled.items()
            if tuple(shares) == steps
        ),
        axis="share",
        shape="dots",
        steps=steps,
    )


def _loss_scales(comparison: Comparison) -> Chart | None:
    scaled = {name: r for name, r in _records(comparison).items() if set(r.loss_scales) != {1}}
    if not scaled:
        return None
    skips = sum(len(record.skipped) for record in scaled.values())
    found = {0: "No step overflowed.", 1: "A cross marks the skipped step."}.get(
        skips, f"Crosses mark the {skips} skipped steps."
    )
    return Chart(
        title="Loss scale",
        caption="Scaling the loss keeps fp16 gradients from underflowing; when they overflow, the "
        f"step is skipped and the scale is halved. {found} Levels not shown use a scale of 1.",
        label="Loss scale of each level with loss scaling",
        lines=tuple(Line(name, r.loss_scales, marks=r.skipped) for name, r in scaled.items()),
        axis="log2",
        shape="stairs",
        steps=range(sys.maxsize),
    )


def _native(comparison: Comparison) -> dict[str, Training]:
    """Returns the records of the variants whose dtype is not emulated."""
    emulated = {result.name for result in comparison.results if result.emulated}
    return {name: r for name, r in _records(comparison).items() if name not in emulated}


def _records(comparison: Comparison) -> dict[str, Training]:
    """Returns the record of each variant that trained, by name."""
    return {r.name: r.training for r in comparison.results if r.training is not None}
