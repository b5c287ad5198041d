"""Unscaling of gradients in place, with a device flag for inf and NaN."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from apex._torch import dtensor, foreach
from apex._torch.copies import moved
from apex._torch.sparse import stored_values

_layout = operator.attrgetter("layout")


def dense_values(grads: list[Tensor]) -> list[Tensor]:
    """Returns dense tensors that share memory with ``grads``: sparse values, DTensors' local parts.

    Coalesce sparse gradients and reduce DTensor gradients over their ranks first: a sum of finite
    values may overflow, and the check must see the sum.
    """
    if are_plain(grads):
        return grads
    grads = [*map(dtensor.local, grads)]
    return [stored_values(grad) if grad.is_sparse else grad for grad in grads]


def values_of(params: Sequence[Tensor]) -> list[Tensor]:
    """Returns the :func:`dense_values` of the parameters' gradients.

    Replaces sparse gradients by coalesced ones before, and partial ones by reduced ones.
    """
    grads = [param.grad for param in params if param.grad is not None]
    if are_plain(grads):
        return grads
    grads = []
    for param in params:
        if param.grad is not None:
            summed = dtensor.laid_out_as(param, param.grad)
            param.grad = summed.coalesce() if summed.is_sparse else summed
            grads.append(param.grad)
    return dense_values(grads)


def are_plain(grads: list[Tensor]) -> bool:
    """Returns whether ``grads`` are dense, and none of them a DTensor."""
    return not dtensor.any_dtensor(grads) and {*map(_layout, grads)} <= {torch.strided}


def summed_values(grad: Tensor) -> Tensor:
    """Returns a sparse gradient's values with duplicate rows summed, others unchanged."""
    return grad.coalesce().values() if grad.is_sparse else grad


def group(grads: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yields gradients in lists of one device and dtype, as foreach kernels require.

    Yields real views of complex gradients, so that one kernel handles all.
    """
    groups: Any = foreach.group([[*grads]])
    for (_, dtype), ((same,), _) in groups.items():
        yield [torch.view_as_real(grad) for grad in same] if dtype.is_complex else same


def unscale_and_check_(values: list[Tensor], inverse_scale: Tensor, found_inf: Tensor) -> None:
    """Multiplies ``values`` by ``inverse_scale`` in place; sets ``found_inf`` to 1 on inf or NaN.

    No host sync. Never clears ``found_inf``, so calls accumulate.

    Args:
        values: Dense gradients on any device, of any floating-point or complex dtype.
        inverse_scale: 0-d fp32, one over the loss scale.
        found_inf: 0-d fp32.
    """
    for grads in group(values):
        device = grads[0].device
        if device == found_inf.device:
            foreach.check_and_unscale_(grads, found_inf, inverse_scale)
            continue
        found_here = torch.zeros((), dtype=torch.float32, device=device)
        foreach.check_and_unscale_(grads, found_here, moved(inverse_scale, device))
        torch.maximum(found_inf, moved(found_here, found_inf.device), out=found_inf)


def unscale_(values: list[Tensor], inverse_scale: float) -> None:
    """Multiplies ``values`` by ``inverse_scale`` in place, without a check."""
    for grads in group(values):
        torch._foreach_mul_(grads, inverse_scale)
