"""The loss-scale rule in a plain form, which a dynamic scaler follows on the device.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from apex._core.arguments import is_number, shown

SMALLEST_SCALE: float = torch.finfo(torch.float32).tiny
"""Lower bound of every scale: positive, and its inverse is finite in fp32."""

_PUBLIC = {"min_scale": "min_loss_scale", "max_scale": "max_loss_scale"}
"""Arguments of ``initialize`` for the bounds, which errors name."""

_LARGEST_SCALE = torch.finfo(torch.float32).max

_FIRST_INF = 2.0**128 - 2.0**103
"""The smallest value that rounds to inf in fp32."""

_MAX_INTERVAL = torch.iinfo(torch.int32).max
"""The growth tracker on the device is an int32."""


class ScaleState(NamedTuple):
    """A loss scale (multiplier) and the clean steps since it last changed."""

    scale: float
    growth_tracker: int


@dataclass(frozen=True)
class ScaleRule:
    """How a dynamic scale changes.

    Every update keeps the scale within its bounds, also one that a script or checkpoint set beyond.

    Attributes:
        growth_factor: Multiplier after ``growth_interval`` clean steps; above 1.
        backoff_factor: Multiplier after an overflow; between 0 and 1.
        growth_interval: Clean steps before growth; at least 1. A whole float becomes an int.
        min_scale: Smallest scale; ``None`` means the smallest normal fp32.
        max_scale: Largest scale; ``None`` means the largest finite fp32.

    Raises:
        TypeError: If a value is not a number, or the interval not an integer.
        ValueError: If a factor, interval or bound is out of range; the message names it.
    """

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float | None = None
    max_scale: float | None = 2.0**24

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_left_out = value is None and name in _PUBLIC
            self._require(name, is_number(value) or is_left_out, "a number", TypeError)
        is_whole = self.growth_interval % 1 == 0
        self._require("growth_interval", is_whole, "an integer", TypeError)
        interval = min(int(self.growth_interval), _MAX_INTERVAL)
        object.__setattr__(self, "growth_interval", interval)  # frozen for everybody else
        self._require("growth_factor", 1.0 < self.growth_factor < math.inf, "above 1")
        self._require("backoff_factor", 0.0 < self.backoff_factor < 1.0, "in (0, 1)")
        self._require("growth_interval", interval >= 1, "at least 1")
        for name in _PUBLIC:
            bound = getattr(self, name)
            self._require(name, bound is None or bound > 0.0, "a positive number or None")
        self._require("min_scale", self.least <= self.greatest, f"at most {self.greatest}")

    def _require(
        self, name: str, holds: bool, accepted: str, error: type[Exception] = ValueError
    ) -> None:
        if not holds:
            value = getattr(self, name)
            raise error(f"{_PUBLIC.get(name, name)} is {value!r}; it must be {accepted}.")

    @classmethod
    def symmetric(cls, factor: Any, interval: Any, **bounds: Any) -> ScaleRule:
        """Returns the rule of apex's scalers, which back off by the inverse of their growth."""
        checked = cls(factor, growth_interval=interval, **bounds)
        return replace(checked, backoff_factor=1.0 / factor)

    @functools.cached_property
    def least(self) -> float:
        """The smallest scale, always above 0."""
        return max(SMALLEST_SCALE, self.min_scale or 0.0)

    @functools.cached_property
    def greatest(self) -> float:
        """The largest scale, always finite in fp32."""
        return min(_LARGEST_SCALE, self.max_scale or math.inf)


def next_scale(state: ScaleState, rule: ScaleRule, *, overflow: bool) -> ScaleState:
    """Returns the loss-scale state after one backward pass: the reference form.

    Backs off on overflow and grows after ``rule.growth_interval`` clean steps, within the bounds of
    the rule. Does not grow beyond the range of fp32.

    Args:
        state: Scale (multiplier on a 0-d loss) and clean steps so far.
        rule: Factors, interval and bounds.
        overflow: Whether any gradient held inf or NaN.
    """
    scale = state.scale
    growth_tracker = state.growth_tracker + 1
    if overflow:
        scale *= rule.backoff_factor
        growth_tracker = 0
    elif growth_tracker >= rule.growth_interval:
        grown = scale * rule.growth_factor
        if grown < _FIRST_INF:
            scale = grown
        growth_tracker = 0
    return ScaleState(min(max(scale, rule.least), rule.greatest), growth_tracker)


def checked_static(loss_scale: Any, name: str = "loss_scale") -> float:
    """Returns a static scale; parses numeric strings.

    Raises:
        ValueError: Unless it and its inverse are positive and finite in fp32.
    """
    try:
        number = math.nan if isinstance(loss_scale, bool) else float(loss_scale)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not SMALLEST_SCALE <= number <= _LARGEST_SCALE:
        raise ValueError(
            f"{name} is {shown(loss_scale)}; it must be a positive, finite number that fp32 can "
            f"hold ({SMALLEST_SCALE:.2g} to {_LARGEST_SCALE:.2g}), or a string with one. For a "
            "dynamic scale, pass loss_scale='dynamic', or dynamic_loss_scale=True to an "
            "FP16_Optimizer."
        )
    return number
