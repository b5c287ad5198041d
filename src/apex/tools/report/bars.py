"""Bars: time per step with its spread, and memory by what it is for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from apex.tools.recommend import megabytes, speedup
from apex.tools.results import Comparison, Result, Timing


@dataclass(frozen=True)
class Part:
    """One piece of a bar.

    Attributes:
        kind: CSS class, for its colour.
        size: In any unit that is common to the figure.
        label: What it is, in words.
    """

    kind: str
    size: float
    label: str


def time_figure(comparison: Comparison) -> str:
    """Returns time per step as bars; emulated variants dwarf the rest and are off the scale."""
    timed = [(r, r.timing) for r in comparison.results if r.timing is not None]
    if not timed:
        return ""
    longest = max(
        (timing.high for result, timing in timed if not result.emulated), default=math.inf
    )
    lines = [
        _line(
            result,
            _time_bar(timing, longest, off_scale=result.emulated),
            f"<b>{_milliseconds(timing.median)}</b> {_speed(result, comparison.baseline)}",
        )
        for result, timing in timed
    ]
    caption = "Median of steps taken in turns; the whisker spans the middle half of them."
    if any(result.emulated for result, _ in timed):
        caption += " Pale: emulated here, and off the scale."
    return _figure("Time per step", caption, lines)


def memory_figure(comparison: Comparison) -> str:
    """Returns what is stored and what a backward pass keeps, as stacked bars."""
    rows = [(result, _parts(result)) for result in comparison.results if result.training]
    if not rows:
        return ""
    largest = max(sum(part.size for part in parts) for _, parts in rows) or 1.0
    lines = [
        _line(
            result,
            "".join(
                f'<i class="bar {part.kind}" style="width:{part.size / largest:.1%}" '
                f'title="{part.label}: {megabytes(round(part.size))}"></i>'
                for part in parts
                if part.size
            ),
            f"<b>{megabytes(round(sum(part.size for part in parts)))}</b>",
        )
        for result, parts in rows
    ]
    used = {part.kind for _, parts in rows for part in parts if part.size}
    legend = "".join(
        f'<li class="key {part.kind}">{part.label}</li>' for part in rows[0][1] if part.kind in used
    )
    caption = "Weights, masters and optimizer state live between two steps."
    return _figure("Memory", caption, lines, legend=f'<ul class="legend">{legend}</ul>')


def _parts(result: Result) -> list[Part]:
    if result.training is None:
        return []
    stored = result.training.stored
    kept = 0 if result.probe is None else result.probe.activation_bytes
    return [
        Part("model", stored.model, "weights"),
        Part("masters", stored.masters, "fp32 masters"),
        Part("optimizer", stored.optimizer, "optimizer state"),
        Part("kept", kept, "kept for the backward pass"),
    ]


def _line(result: Result, bars: str, value: str) -> str:
    return (
        f'<li class="{result.name}"><b class="chip {result.name}">{result.name}</b>'
        f'<span class="track">{bars}</span><span class="value">{value}</span></li>'
    )


def _time_bar(timing: Timing, longest: float, *, off_scale: bool) -> str:
    if off_scale:
        return '<i class="bar off" style="width:100%"></i>'
    bar = f'<i class="bar" style="width:{timing.median / longest:.1%}"></i>'
    return bar + _whisker(timing, longest)


def _whisker(timing: Timing, longest: float) -> str:
    left, width = timing.low / longest, (timing.high - timing.low) / longest
    return f'<i class="whisker" style="left:{left:.1%};width:{width:.1%}"></i>'


def _figure(title: str, caption: str, lines: list[str], *, legend: str = "") -> str:
    return (
        f"<figure><figcaption><h2>{title}</h2><p>{caption}</p></figcaption>{legend}"
        f'<ul class="bars">{"".join(lines)}</ul></figure>'
    )


def _milliseconds(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _speed(result: Result, base: Result) -> str:
    speed = speedup(result, base)
    return "" if speed is None or result.name == base.name else f"{speed:.2f}x"
