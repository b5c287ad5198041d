"""Scaling, weighted sums, and loss scales with hysteresis."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_C.lists import TensorLists, checked, set_noop_
from apex._core.finite import group
from apex._core.foreach.gate import Scalar, as_scalar, as_tensor
from apex._core.foreach.norms import any_non_finite
from apex._core.foreach.working import math_dtype, store, working
from apex._torch import foreach
from apex._torch.copies import moved

__all__ = ["multi_tensor_axpby", "multi_tensor_scale", "update_scale_hysteresis"]


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float | Tensor
) -> None:
    """Writes ``scale * source`` to the targets; sets the flag if a source is not finite.

    ``tensor_lists`` are ``[sources, targets]``; both may be the same tensors.
    """
    sources, targets = checked("multi_tensor_scale", noop_flag, tensor_lists, 2)
    if sources:
        set_noop_(noop_flag, scale_(sources, targets, as_scalar(scale, noop_flag.device)))


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

    ``tensor_lists`` are ``[xs, ys, targets]``; targets may be xs or ys. ``arg_to_check`` says which
    inputs to check: 0 for x, 1 for y, -1 for both.
    """
    if arg_to_check not in (-1, 0, 1):
        raise ValueError(
            f"multi_tensor_axpby got arg_to_check={arg_to_check!r}; it must be 0 (check x), "
            "1 (check y) or -1 (check both)."
        )
    xs, ys, targets = checked("multi_tensor_axpby", noop_flag, tensor_lists, 3)
    if not xs:
        return
    inputs = [*xs, *ys] if arg_to_check == -1 else (xs, ys)[arg_to_check]
    a, b = (as_scalar(factor, noop_flag.device) for factor in (a, b))
    found_inf = any_non_finite(inputs, xs[0].device)
    left, right = working(xs, ys)
    total = list(torch._foreach_mul(left, a))
    if isinstance(b, Tensor):
        torch._foreach_add_(total, torch._foreach_mul(right, b))
    else:
        torch._foreach_add_(total, right, alpha=b)
    store(targets, total)
    set_noop_(noop_flag, found_inf)


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


def scale_(sources: list[Tensor], targets: list[Tensor], scale: Scalar) -> Tensor:
    """Writes ``scale * source`` into each target, rounded once; targets may be the sources.

    Returns:
        A 0-d fp32 flag: 1 if any source held inf or NaN.
    """
    device = sources[0].device
    found_inf = torch.zeros((), dtype=torch.float32, device=device)
    # GradScaler's kernel, which multiplies in place and checks its input.
    factor = as_tensor(scale, device)
    values = [_product(s, t) for s, t in zip(sources, targets, strict=True)]
    store(values, sources)
    for same in group(values):
        foreach.check_and_unscale_(same, found_inf, factor)
    store(targets, values)
    return found_inf


def _product(source: Tensor, target: Tensor) -> Tensor:
    """Returns the tensor to multiply in: the target, unless it would round the source."""
    if target is source or target.dtype is source.dtype:
        return target
    dtype = math_dtype(source, target)
    return target if target.dtype is dtype else torch.empty_like(target, dtype=dtype)
