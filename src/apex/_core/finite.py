"""Unscale gradients in place and say on the device whether any held inf or NaN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def dense_values(grads: list[Tensor]) -> list[Tensor]:
    """Returns dense tensors that share memory with ``grads``: the values of sparse ones.

    Sparse gradients must be coalesced: rows that are finite one by one may overflow in their sum,
    so the check must see the sum.
    """
    if all(grad.layout is torch.strided for grad in grads):
        return grads
    return [grad._values() if grad.is_sparse else grad for grad in grads]


def group(grads: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yields gradients in lists of one device and one dtype, as the foreach kernels want.

    Complex ones come as their real view, so that one kernel serves all.
    """
    groups: Any = Optimizer._group_tensors_by_device_and_dtype([[*grads]])
    for (_, dtype), ((same,), _) in groups.items():
        yield [torch.view_as_real(grad) for grad in same] if dtype.is_complex else same


def unscale_and_check_(values: list[Tensor], inverse_scale: Tensor, found_inf: Tensor) -> None:
    """Multiplies ``values`` by ``inverse_scale`` in place; sets ``found_inf`` to 1 on inf or NaN.

    No host sync. ``found_inf`` is only ever raised, never cleared, so several calls accumulate.

    Args:
        values: Dense gradients of any device and floating or complex dtype.
        inverse_scale: 0-d fp32, one over the loss scale.
        found_inf: 0-d fp32.
    """
    for grads in group(values):
        device = grads[0].device
        if device == found_inf.device:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse_scale)
            continue
        found_here = torch.zeros((), device=device)
        inverse_here = inverse_scale.to(device, non_blocking=True)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_here, inverse_here)
        raise_flag_(found_inf, found_here.to(found_inf.device, non_blocking=True))


def unscale_(values: list[Tensor], inverse_scale: float) -> None:
    """Multiplies ``values`` by ``inverse_scale`` in place, without a check."""
    for grads in group(values):
        torch._foreach_mul_(grads, inverse_scale)


def raise_flag_(flag: Tensor, other: Tensor) -> None:
    """Sets 0-d ``flag`` where 0-d ``other`` is set, on the device."""
    torch.maximum(flag, other, out=flag)
