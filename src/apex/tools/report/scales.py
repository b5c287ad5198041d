"""Axes: their ends, round ticks, and where a value is between the ends."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

Axis = Literal["log10", "log2", "share", "difference", "relative"]
"""Scale of an axis: powers of ten or two, shares from 0 to 1, or differences around 0, absolute or
in percent."""

AROUND_ZERO = ("difference", "relative")

BASES = {"log10": 10, "log2": 2}

SHARE_ENDS = (0.04, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)


def share(value: float, low: float, high: float, axis: Axis) -> float:
    """Returns where ``value``, clamped, is from ``low`` (0) to ``high`` (1)."""
    value = min(max(value, low), high)
    if axis in BASES:
        value, low, high = math.log(value), math.log(low), math.log(high)
    return (value - low) / (high - low)


def value_range(values: Sequence[float], axis: Axis) -> tuple[float, float]:
    """Returns the ends of an axis for ``values``, with a margin."""
    if axis in AROUND_ZERO:
        size = max((abs(value) for value in values if math.isfinite(value)), default=0.0) or 1.0
        return -1.1 * size, 1.1 * size
    found = [value for value in values if math.isfinite(value) and value > 0]
    if axis == "share":
        largest = max(found, default=1.0)
        return 0.0, next((end for end in SHARE_ENDS if end >= largest), 1.0)
    margin = 2.0 if axis == "log2" else 1.15
    return min(found, default=1.0) / margin, max(found, default=1.0) * margin


def value_ticks(low: float, high: float, axis: Axis, most: int = 6) -> list[float]:
    """Returns round values between ``low`` and ``high``."""
    if axis == "share":
        return [high * quarter / 4 for quarter in range(5)]
    if axis in AROUND_ZERO:
        return round_ticks(low, high, most)
    base = BASES[axis]
    powers = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    decades = [float(base) ** power for power in powers]
    fine = [decade * factor for decade in decades for factor in ((1, 2, 5) if base == 10 else (1,))]
    inside = [value for value in fine if low <= value <= high]
    if base == 10 and len(inside) < 2 and low > 1e-4 and high < 1e5:
        return round_ticks(low, high, most)
    if len(inside) <= most:
        return inside
    inside = [value for value in decades if low <= value <= high]
    return inside[:: math.ceil(len(inside) / most)]


def round_ticks(low: float, high: float, most: int, least_gap: float = 0.0) -> list[float]:
    """Returns at most ``most`` round values in ``low`` to ``high``, ``least_gap`` apart or more."""
    power = math.floor(math.log10((high - low) or 1.0)) - 1
    gaps = (factor * 10.0**p for p in itertools.count(power) for factor in (1, 2, 5))
    ends = ((math.ceil(low / gap), math.floor(high / gap), gap) for gap in gaps if gap >= least_gap)
    first, last, gap = next(each for each in ends if each[1] - each[0] < most)
    return [float(f"{index * gap:.9g}") for index in range(first, last + 1)]


def tick_label(value: float, axis: Axis) -> tuple[str, str]:
    """Returns a tick's label and the exponent after it, which may be empty."""
    if axis == "share":
        return f"{value * 100:.3g} %", ""
    if axis in AROUND_ZERO:
        percent = axis == "relative"
        text = f"{value * 100:+.3g} %" if percent else f"{value:+.3g}"
        return (text.replace("-", "\N{MINUS SIGN}") if value else "0"), ""
    if axis == "log10" and 1e-4 < value < 1e5:
        return f"{value:f}".rstrip("0").rstrip("."), ""
    base = BASES[axis]
    power = math.floor(math.log(value, base) + 1e-9)
    factor = round(value / base**power)
    return (f"{factor}·{base}" if factor > 1 else str(base)), str(power)
