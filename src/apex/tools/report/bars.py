"""Bars: time per step with its spread, and memory by use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from apex.tools.results import Comparison, Result, Stored, Timing
from apex.tools.rows import megabytes, three_digits
from apex.tools.variants import BASELINE


@dataclass(frozen=True)
class Piece:
    """One piece of a bar: CSS classes, the CSS that places it, and a title shown on hover."""

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
    """Bars with a title; ``legend`` holds the label of each kind of piece by CSS class."""

    title: str
    caption: str
    bars: tuple[Bar, ...]
    legend: Mapping[str, str]


_STORED = {"model": "weights", "masters": "fp32 masters", "optimizer": "optimizer state"}
"""What is stored between steps: fields of ``Stored``, also CSS classes, and their labels."""

_USES = _STORED | {"kept": "saved for backward"}
"""What memory is for."""


def bar_figures(comparison: Comparison) -> list[BarFigure]:
    """Returns the figures that have data to show."""
    figures = _time(comparison), _peak(comparison), _stored(comparison)
    return [figure for figure in figures if figure.bars]


def _time(comparison: Comparison) -> BarFigure:
    timed = [(r, r.timing) for r in comparison.results if r.timing is not None]
    longest = max((t.quartiles[1] for result, t in timed if not result.emulated), default=math.inf)
    bars = tuple(
        Bar(
            result.name,
            # An emulated variant takes so long that the others would shrink to nothing.
            (Piece("bar off", "width:100%"),) if result.emulated else _time_bar(timing, longest),
            f"{three_digits(timing.median)} ms",
            _speed(result, comparison),
        )
        for result, timing in timed
    )
    caption = "Median over interleaved steps; the whisker spans the interquartile range."
    if any(result.emulated for result, _ in timed):
        caption += " Pale bars: emulated here, and not to scale."
    return BarFigure("Time per step", caption, bars, legend={})


def _time_bar(timing: Timing, longest: float) -> tuple[Piece, ...]:
    low, high = timing.quartiles
    left, width = low / longest, (high - low) / longest
    return (
        Piece("bar", f"width:{timing.median / longest:.1%}"),
        Piece("whisker", f"left:{left:.1%};width:{width:.1%}"),
    )


def _peak(comparison: Comparison) -> BarFigure:
    known = [result for result in comparison.results if result.memory]
    largest = max((result.memory for result in known), default=0)
    bars = tuple(_memory_bar(result, largest) for result in known)
    measured = {r.training.peak_from for r in known if r.training is not None} - {None}
    if not measured:
        caption = (
            "Bytes stored between steps and saved for backward; the peak is not measured here."
        )
        return BarFigure("Memory of a step", caption, bars, _USES)
    caption = "Most bytes allocated at any time during training."
    if "events" in measured:
        caption = "Most bytes allocated in one more iteration, by the allocator's events."
    return BarFigure("Peak memory", caption, bars, legend={})


def _memory_bar(result: Result, largest: int) -> Bar:
    record, probe = result.training, result.probe
    if record is None or probe is None or record.peak_bytes is not None:
        pieces: tuple[Piece, ...] = (Piece("bar", f"width:{result.memory / largest:.1%}"),)
    else:
        sizes = _sizes(record.stored) | {"kept": probe.activation_bytes}
        pieces = tuple(
            _piece(use, size / largest, megabytes(size)) for use, size in sizes.items() if size
        )
    return Bar(result.name, pieces, megabytes(result.memory))


def _stored(comparison: Comparison) -> BarFigure:
    stored = {r.name: r.training.stored for r in comparison.results if r.training is not None}
    most = max((each.per_param for each in stored.values()), default=0.0) or 1.0
    bars = tuple(
        Bar(
            name,
            tuple(
                _piece(use, size / most, f"{size:.1f} bytes per parameter")
                for use, bytes_ in _sizes(each).items()
                if (size := bytes_ / max(each.params, 1))
            ),
            f"{each.per_param:.1f} B",
        )
        for name, each in stored.items()
    )
    caption = "Bytes of weights, fp32 masters and optimizer state between steps."
    return BarFigure("Stored per parameter", caption, bars, _STORED)


def _piece(use: str, share: float, amount: str) -> Piece:
    return Piece(f"bar {use}", f"width:{share:.1%}", f"{_USES[use]}: {amount}")


def _sizes(stored: Stored) -> dict[str, int]:
    return {use: getattr(stored, use) for use in _STORED}


def _speed(result: Result, comparison: Comparison) -> str:
    speed = comparison.speed(result)
    return "" if speed is None or result.name == BASELINE else f"{speed.median:.2f}x"
