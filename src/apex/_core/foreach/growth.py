"""The loss-scale rule that tolerates a number of overflows before it backs off."""

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
    """Moves a loss scale in place, without a host sync.

    An overflow uses up one of ``tolerance``; while some is left the scale stays and only the
    count of clean steps restarts. Without any left, each overflow multiplies the scale by
    ``backoff_factor``. A clean step restores the tolerance, and ``growth_interval`` of them in a
    row multiply the scale by ``growth_factor`` unless that is beyond fp32.

    Args:
        scale: Loss scale, one fp32 element.
        clean_steps: Clean steps since the scale last changed, one int32 element.
        tolerance: Overflows that are left, one int32 element.
        found_inf: Above 0 for an overflow, one element.
        growth_factor: Multiplier after ``growth_interval`` clean steps.
        backoff_factor: Multiplier after an overflow too many.
        growth_interval: Clean steps before growth.
        hysteresis: Overflows in a row of which the last one backs off.
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
