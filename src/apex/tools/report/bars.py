"""Bars: time per step with its spread, and memory by use."""

from __future__ import annotations

import math
from dataclasses import dataclass

from apex.tools.results import Comparison, Result, Timing
from apex.tools.sizes import megabytes
from apex.tools.variants import BASELINE


@dataclass(frozen=True)
class Piece:
    """One piece of a bar.

    Attributes:
        kind: CSS classes.
        style: CSS that places it.
        title: Shown on hover.
    """

    kind: str
    style: str
    title: str = ""


@dataclass(frozen=True)
class Bar:
    """One variant's bar, with the value beside it."""

    name: str
    pieces: tuple[Piece, ...]
    value: str
    remark: str = ""


@dataclass(frozen=True)
class BarFigure:
    """Bars with a title; ``legend`` holds CSS class and label of each kind of piece."""

    title: str
    caption: str
    bars: tuple[Bar, ...]
    legend: tuple[tuple[str, str], ...] = ()


def bar_figures(comparison: Comparison) -> list[BarFigure]:
    """Returns the figures that have data to show."""
    return [*_time(comparison), *_memory(comparison)]


def _time(comparison: Comparison) -> list[BarFigure]:
    timed = [(r, r.timing) for r in comparison.results if r.timing is not None]
    if not timed:
        return []
    longest = max((t.quartiles[1] for result, t in timed if not result.emulated), default=math.inf)
    bars = tuple(
        Bar(
            result.name,
            # An emulated variant takes so long that the others would shrink to nothing.
            (Piece("bar off", "width:100%"),) if result.emulated else _time_bar(timing, longest),
            _milliseconds(timing.median),
            _speed(result, comparison),
        )
        for result, timing in timed
    )
    caption = "Median over interleaved steps; the whisker spans the interquartile range."
    if any(result.emulated for result, _ in timed):
        caption += " Pale bars: emulated here, and not to scale."
    return [BarFigure("Time per step", caption, bars)]


def _time_bar(timing: Timing, longest: float) -> tuple[Piece, ...]:
    low, high = timing.quartiles
    left, width = low / longest, (high - low) / longest
    return (
        Piece("bar", f"width:{timing.median / longest:.1%}"),
        Piece("whisker", f"left:{left:.1%};width:{width:.1%}"),
    )


_LABELS = {
    "model": "weights",
    "masters": "fp32 masters",
    "optimizer": "optimizer state",
    "kept": "saved for backward",
}
"""What memory is for: CSS class and label."""


def _memory(comparison: Comparison) -> list[BarFigure]:
    used = {result.name: _bytes_by_use(result) for result in comparison.results if result.training}
    if not used:
        return []
    totals = {name: sum(sizes.values()) for name, sizes in used.items()}
    largest = max(totals.values()) or 1
    bars = tuple(
        Bar(
            name,
            tuple(
                Piece(
                    f"bar {kind}",
                    f"width:{size / largest:.1%}",
                    f"{_LABELS[kind]}: {megabytes(size)}",
                )
                for kind, size in sizes.items()
            ),
            megabytes(totals[name]),
        )
        for name, sizes in used.items()
    )
    shown = {kind for sizes in used.values() for kind in sizes}
    legend = tuple((kind, label) for kind, label in _LABELS.items() if kind in shown)
    caption = "Weights, masters and optimizer state persist between steps."
    return [BarFigure("Memory", caption, bars, legend)]


def _bytes_by_use(result: Result) -> dict[str, int]:
    """Returns the bytes of each use that takes any, by its CSS class."""
    if result.training is None:
        return {}
    stored = result.training.stored
    sizes = {
        "model": stored.model,
        "masters": stored.masters,
        "optimizer": stored.optimizer,
        "kept": result.probe.activation_bytes if result.probe else 0,
    }
    return {kind: size for kind, size in sizes.items() if size}


def _milliseconds(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _speed(result: Result, comparison: Comparison) -> str:
    speed = comparison.speed(result)
    return "" if speed is None or result.name == BASELINE else f"{speed.median:.2f}x"
