"""The loss-scale rule: a plain reference form, and the same rule on 0-d device tensors.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from apex._torch import private

SMALLEST_SCALE: float = torch.finfo(torch.float32).tiny
"""The floor under every dynamic scale: its inverse is finite in fp32, so no step divides by 0."""


_PUBLIC = {"floor": "min_loss_scale", "ceiling": "max_loss_scale"}

_LARGEST_SCALE = torch.finfo(torch.float32).max


class ScaleState(NamedTuple):
    """A loss scale (multiplier) and the clean steps since it last changed."""

    scale: float
    clean_steps: int


@dataclass(frozen=True)
class ScaleRule:
    """How a dynamic scale moves.

    Attributes:
        growth_factor: Multiplier after ``growth_interval`` clean steps; above 1.
        backoff_factor: Multiplier after an overflow; between 0 and 1.
        growth_interval: Clean steps before growth; at least 1.
        floor: Least scale; ``None`` means the smallest normal fp32.
        ceiling: Greatest scale; ``None`` means the greatest finite fp32.

    Raises:
        TypeError: For a value that is no number, or an interval that is no integer.
        ValueError: For a factor, interval or bound outside its range, naming it.
    """

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    floor: float | None = None
    ceiling: float | None = None

    def __post_init__(self) -> None:
        """Checks every value's type, then its range."""
        for name, value in vars(self).items():
            optional = value is None and name in ("floor", "ceiling")
            kind: type = numbers.Integral if name == "growth_interval" else numbers.Real
            if not optional and (isinstance(value, bool) or not isinstance(value, kind)):
                wanted = "an integer" if kind is numbers.Integral else "a number"
                raise TypeError(f"{_PUBLIC.get(name, name)} is {value!r}; it must be {wanted}.")
        _require(self.growth_factor > 1.0, "growth_factor", self.growth_factor, "above 1")
        _require(
            0.0 < self.backoff_factor < 1.0, "backoff_factor", self.backoff_factor, "in (0, 1)"
        )
        _require(self.growth_interval >= 1, "growth_interval", self.growth_interval, "at least 1")
        for name, bound in (("min_loss_scale", self.floor), ("max_loss_scale", self.ceiling)):
            _require(bound is None or bound > 0.0, name, bound, "a positive number or None")
        _require(
            self.least <= self.greatest, "min_loss_scale", self.floor, f"at most {self.greatest}"
        )

    @property
    def least(self) -> float:
        """The least scale, always above 0."""
        return max(SMALLEST_SCALE, self.floor or 0.0)

    @property
    def greatest(self) -> float:
        """The greatest scale, always finite in fp32."""
        return _LARGEST_SCALE if self.ceiling is None else min(_LARGEST_SCALE, self.ceiling)


def next_scale(state: ScaleState, rule: ScaleRule, *, overflow: bool) -> ScaleState:
    """Returns the loss-scale state after one backward pass: the reference form.

    Backs off on overflow, grows after ``rule.growth_interval`` clean steps, and keeps the scale
    within the rule's bounds.

    Args:
        state: Scale (multiplier on a 0-d loss) and clean steps so far.
        rule: Factors, interval and bounds.
        overflow: Whether any gradient held inf or NaN.
    """
    scale, clean_steps = state.scale, state.clean_steps + 1
    if overflow:
        scale, clean_steps = scale * rule.backoff_factor, 0
    elif clean_steps >= rule.growth_interval:
        grown = scale * rule.growth_factor
        # The device form takes no step that fp32 cannot hold.
        scale, clean_steps = grown if grown <= _LARGEST_SCALE else scale, 0
    return ScaleState(min(max(scale, rule.least), rule.greatest), clean_steps)


def update_scale_(scale: Tensor, clean_steps: Tensor, found_inf: Tensor, rule: ScaleRule) -> None:
    """Moves ``scale`` and ``clean_steps`` in place by :func:`next_scale`, without a host sync.

    Args:
        scale: 0-d fp32.
        clean_steps: 0-d int32 on the same device.
        found_inf: 0-d fp32 on the same device; non-zero means overflow.
        rule: Factors, interval and bounds.
    """
    private.update_scale_(
        scale,
        clean_steps,
        found_inf,
        rule.growth_factor,
        rule.backoff_factor,
        rule.growth_interval,
    )
    scale.clamp_(rule.least, rule.greatest)


def checked_static(loss_scale: float) -> float:
    """Returns a static scale, or raises ValueError unless it is positive and finite."""
    if not (loss_scale > 0.0 and math.isfinite(loss_scale)):
        raise ValueError(
            f"loss_scale is {loss_scale}; a static loss scale must be a positive, finite number. "
            'Pass such a number, or "dynamic".'
        )
    return loss_scale


def _require(holds: bool, name: str, value: object, accepted: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}; it must be {accepted}.")
