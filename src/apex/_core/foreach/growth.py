"""A loss-scale rule that tolerates several overflows before it backs off."""

from __future__ import annotations

import torch
from torch import Tensor

from apex._torch.copies import moved


def update_scale_hysteresis_(
    scale: Tensor,
    clean_steps: Tensor,
    tolerance: Tensor,
    found_inf: Tensor,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> None:
    """Updates a loss scale in place, without a host sync.

    An overflow decrements ``tolerance`` and restarts the count of clean steps; if the tolerance is
    then 0 or below, it also multiplies the scale by ``backoff_factor``. A clean step resets the
    tolerance to ``hysteresis``; ``growth_interval`` consecutive ones multiply the scale by
    ``growth_factor``, unless the result exceeds fp32.

    Args:
        scale: Loss scale, one fp32 element.
        clean_steps: Clean steps since the last overflow or growth, one int32 element.
        tolerance: Remaining tolerance, one int32 element.
        found_inf: Above 0 for an overflow, one element.
        growth_factor: Multiplier after ``growth_interval`` clean steps.
        backoff_factor: Multiplier after an overflow without remaining tolerance.
        growth_interval: Clean steps before growth.
        hysteresis: Consecutive overflows at which the scale backs off.
    """
    overflow = moved(found_inf, scale.device).reshape(scale.shape) > 0
    left = tolerance.reshape(scale.shape) - overflow.to(tolerance.dtype)
    steps = clean_steps.reshape(scale.shape) + 1
    grows = steps == growth_interval
    grown = scale * growth_factor
    grown = torch.where(torch.isfinite(grown), grown, scale)
    reduced = torch.where(left > 0, scale, scale * backoff_factor)
    clean = torch.where(grows, grown, scale)
    scale.copy_(torch.where(overflow, reduced, clean))
    clean_steps.copy_(torch.where(overflow | grows, 0, steps).reshape(clean_steps.shape))
    tolerance.copy_(torch.where(overflow, left, hysteresis).reshape(tolerance.shape))
