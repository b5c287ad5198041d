"""Scaling, weighted sums, and loss scales with hysteresis."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from amp_C.lists import TensorLists, set_noop_, takes
from apex._core.foreach.norms import any_non_finite
from apex._core.foreach.working import store, working
from apex._torch.copies import as_scalar, moved

__all__ = ["multi_tensor_axpby", "multi_tensor_scale", "update_scale_hysteresis"]


@takes(2)
def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float | Tensor
) -> None:
    """Writes ``scale * source`` to the targets; sets the flag if a source is not finite.

    ``tensor_lists`` are ``[sources, targets]``; both may be the same tensors.
    """
    sources, factor = tensor_lists[0], as_scalar(scale, noop_flag.device)
    set_noop_(noop_flag, any_non_finite(sources, noop_flag.device))
    with working(*tensor_lists) as (values, targets):
        store(targets, values)
        torch._foreach_mul_(targets, factor)


@takes(3)
def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    a: float | Tensor,
    b: float | Tensor,
    arg_to_check: int,
) -> None:
    """Writes ``a * x + b * y`` to the targets; sets the flag if an input is not finite.

    ``tensor_lists`` are ``[xs, ys, targets]``; targets may be xs or ys. ``arg_to_check`` says which
    inputs to check: 0 for x, 1 for y, -1 for both.
    """
    checked = {0: tensor_lists[:1], 1: tensor_lists[1:2], -1: tensor_lists[:2]}[arg_to_check]
    device = noop_flag.device
    set_noop_(noop_flag, any_non_finite([*chain(*checked)], device))
    with working(*tensor_lists) as (xs, ys, targets):
        left = torch._foreach_mul(xs, as_scalar(a, device))
        right = torch._foreach_mul(ys, as_scalar(b, device))
        store(targets, torch._foreach_add(left, right))


@torch.no_grad()
def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Updates a loss scale in place that backs off after several overflows, without a host sync.

    An overflow decrements ``hysteresis_tracker`` and restarts the count of clean steps; if the
    tracker is then 0 or below, it also multiplies the scale by ``backoff_factor``. A clean step
    resets the tracker to ``hysteresis``; ``growth_interval`` consecutive ones multiply the scale by
    ``growth_factor``, unless the result exceeds fp32.

    The scale is one fp32 element, ``growth_tracker`` (clean steps since the last change) and
    ``hysteresis_tracker`` (overflows left before backing off) are one int32 element each, and
    ``found_inf``, one element, is positive in case of an overflow. Returns ``current_scale``.
    """
    scale = current_scale
    overflow = moved(found_inf, scale.device).reshape(scale.shape) > 0
    left = hysteresis_tracker.reshape(scale.shape) - overflow.to(hysteresis_tracker.dtype)
    steps = growth_tracker.reshape(scale.shape) + 1
    grows = steps == growth_interval
    grown = scale * growth_factor
    grown = torch.where(torch.isfinite(grown), grown, scale)
    reduced = torch.where(left > 0, scale, scale * backoff_factor)
    scale.copy_(torch.where(overflow, reduced, torch.where(grows, grown, scale)))
    growth_tracker.copy_(torch.where(overflow | grows, 0, steps).reshape(growth_tracker.shape))
    left = torch.where(overflow, left, hysteresis)
    hysteresis_tracker.copy_(left.reshape(hysteresis_tracker.shape))
    return scale
