"""Scaling, weighted sums, and loss scales with hysteresis."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_C.lists import TensorLists, set_noop_, takes
from apex._core.foreach.norms import any_non_finite
from apex._optimizer_rules.working import store, working
from apex._torch.copies import as_scalar, moved

__all__ = ["multi_tensor_axpby", "multi_tensor_scale", "update_scale_hysteresis"]


@takes(2)
def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float | Tensor
) -> None:
    """Writes ``scale * source`` to the targets; sets the flag if a source is not finite.

    ``tensor_lists`` are ``[sources, targets]``; both may be the same tensors.
    """
    device = noop_flag.device
    sources, _ = tensor_lists
    set_noop_(noop_flag, any_non_finite(sources, device))
    with working(*tensor_lists) as (values, targets):
        store(targets, values)
        torch._foreach_mul_(targets, as_scalar(scale, device))


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

    ``tensor_lists`` are ``[xs, ys, targets]``; targets may be xs or ys. ``arg_to_check`` selects
    the inputs to check: 0 for x, 1 for y, -1 for both.
    """
    xs, ys, _ = tensor_lists
    checked = {0: xs, 1: ys, -1: [*xs, *ys]}[arg_to_check]
    device = noop_flag.device
    set_noop_(noop_flag, any_non_finite(checked, device))
    with working(*tensor_lists) as (wide_xs, wide_ys, targets):
        left = torch._foreach_mul(wide_xs, as_scalar(a, device))
        right = torch._foreach_mul(wide_ys, as_scalar(b, device))
        sums = torch._foreach_add(left, right)
        store(targets, sums)


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

    An overflow decrements ``hysteresis_tracker`` and restarts the count of clean steps. If the
    tracker is then 0 or below, the scale is multiplied by ``backoff_factor``. A clean step resets
    the tracker to ``hysteresis``. After ``growth_interval`` consecutive clean steps, the scale is
    multiplied by ``growth_factor``, unless the result exceeds fp32.

    Each argument has one element. The scale is fp32. ``growth_tracker`` (clean steps since the last
    change) and ``hysteresis_tracker`` (overflows left before backing off) are int32. ``found_inf``
    is positive after an overflow. Returns ``current_scale``.
    """
    scale = current_scale.view(())
    clean_steps = growth_tracker.view(())
    left = hysteresis_tracker.view(())
    overflow = moved(found_inf, scale.device).view(()) > 0
    left.copy_(torch.where(overflow, left - 1, hysteresis))
    clean_steps.copy_(torch.where(overflow, 0, clean_steps + 1))
    reduced = torch.where(left > 0, scale, scale * backoff_factor)
    grown = scale * growth_factor
    grows = (clean_steps == growth_interval) & ~overflow
    scale.copy_(torch.where(overflow, reduced, scale))
    scale.copy_(torch.where(grows & torch.isfinite(grown), grown, scale))
    clean_steps.copy_(torch.where(grows, 0, clean_steps))
    return current_scale
