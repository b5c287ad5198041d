"""Numbers of a rule that are on the host or on the device; using them never waits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from apex._torch.copies import as_tensor

Scalar = float | Tensor
"""A host number, or a 0-d tensor on the device of the parameters."""

Tensors = list[Tensor] | tuple[Tensor, ...]
"""What foreach kernels take and return."""


def skip_flag(flag: Tensor | None, device: torch.device) -> Tensor | None:
    """Returns a one-element tensor of any device as 0-d fp32 there: 1 to skip, 0 to step."""
    if flag is None:
        return None
    is_set = as_tensor(flag, device) != 0
    return is_set.to(torch.float32)


def bias_correction(beta: float, step: Scalar) -> Scalar:
    """Returns ``1 - beta ** step`` for a host or device step count.

    Uses ``expm1`` on the device: in fp32, the plain form loses four decimal digits at
    ``beta=0.999``.
    """
    if not isinstance(step, Tensor):
        return float(1.0 - beta**step)
    if beta == 0.0:
        return 1.0
    return -torch.expm1(step.reshape(()).to(torch.float32) * math.log(beta))


def decayed(updates: Tensors, params: Tensors, weight_decay: float) -> Tensors:
    """Returns gradients or updates with weight decay added, as new tensors if there is any."""
    if not weight_decay:
        return updates
    return torch._foreach_add(updates, params, alpha=weight_decay)


def decay_(params: Tensors, rate: Scalar, weight_decay: float, skip: Tensor | None) -> None:
    """Multiplies parameters by ``1 - rate * weight_decay`` in place, unless 0-d ``skip`` is set."""
    if not weight_decay:
        return
    factor = 1.0 - rate * weight_decay
    if skip is not None:
        factor = torch.where(skip != 0, 1.0, as_tensor(factor, skip.device))
    torch._foreach_mul_(params, factor)


def descend_(params: Tensors, updates: Tensors, rate: Scalar) -> None:
    """Subtracts ``rate`` times the updates from the parameters, in place."""
    if isinstance(rate, Tensor):
        torch._foreach_sub_(params, torch._foreach_mul(updates, rate))
    else:
        torch._foreach_add_(params, updates, alpha=-rate)  # allocates nothing


def descend_each_(
    params: Tensors, updates: Tensors, rates: Tensor, skip: Tensor | None = None
) -> None:
    """Subtracts from each parameter its update, finite, times its rate, in place.

    ``rates`` are ``[N]``. Where ``skip``, 0-d, is set, the parameters stay.
    """
    if skip is not None:
        rates = torch.where(skip != 0, 0.0, rates)
    torch._foreach_addcmul_(params, updates, rates.unbind(), value=-1.0)
