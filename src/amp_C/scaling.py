"""Scaling, weighted sums, and loss scales with hysteresis."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_C.lists import TensorLists, checked, set_noop_
from apex._core.foreach import growth, scaling
from apex._core.foreach.gate import as_scalar


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float | Tensor
) -> None:
    """Writes ``scale * source`` to the targets; sets the flag if a source is not finite.

    Args:
        chunk_size: Ignored.
        noop_flag: One int32 element.
        tensor_lists: ``[sources, targets]``, any mix of dtypes; both may be the same tensors.
        scale: The multiplier; a tensor of one element stays on the device.
    """
    del chunk_size
    sources, targets = checked("multi_tensor_scale", noop_flag, tensor_lists, 2)
    if sources:
        factor = as_scalar(scale, noop_flag.device)
        set_noop_(noop_flag, scaling.scale_(sources, targets, factor))


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    a: float | Tensor,
    b: float | Tensor,
    arg_to_check: int,
) -> None:
    """Writes ``a * x + b * y`` to the targets; sets the flag if an input is not finite.

    Args:
        chunk_size: Ignored.
        noop_flag: One int32 element.
        tensor_lists: ``[xs, ys, targets]``, any mix of dtypes; targets may be xs or ys.
        a: Multiplier of x.
        b: Multiplier of y.
        arg_to_check: Which inputs to check: 0 for x, 1 for y, -1 for both.
    """
    del chunk_size
    if arg_to_check not in (-1, 0, 1):
        raise ValueError(
            f"multi_tensor_axpby got arg_to_check={arg_to_check!r}; it must be 0 (check x), "
            "1 (check y) or -1 (check both)."
        )
    xs, ys, targets = checked("multi_tensor_axpby", noop_flag, tensor_lists, 3)
    if not xs:
        return
    check = [xs, ys] if arg_to_check == -1 else [(xs, ys)[arg_to_check]]
    a, b = (as_scalar(factor, noop_flag.device) for factor in (a, b))
    set_noop_(noop_flag, scaling.axpby_(xs, ys, targets, a, b, check=check))


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
    """Updates a loss scale that backs off only after ``hysteresis`` consecutive overflows.

    Works in place and on the device.

    Args:
        current_scale: Loss scale, one fp32 element.
        growth_tracker: Clean steps since the last change, one int32 element.
        hysteresis_tracker: Remaining overflows before backing off, one int32 element.
        found_inf: Positive in case of an overflow, one element.
        growth_factor: Multiplier after ``growth_interval`` clean steps.
        backoff_factor: Multiplier when backing off.
        growth_interval: Clean steps before growth.
        hysteresis: Number of consecutive overflows before backing off.

    Returns:
        ``current_scale``.
    """
    growth.update_scale_hysteresis_(
        current_scale,
        growth_tracker,
        hysteresis_tracker,
        found_inf,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
    )
    return current_scale
