"""What a loss scaler asks of a step: a flag that turns it off; no host sync.

Note [Gate]
Where the flag is set, the gradient of every rule becomes 0 (not multiplied by 0: inf * 0 is NaN)
and every coefficient its neutral value: decay rates 1, learning rates 0, denominators 1. So
``m = 1 * m + 0`` and ``p = p - 0 * update`` leave state and parameters bit for bit as they are.
torch's fused kernels take the flag itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from apex._torch import dtensor
from apex._torch.copies import moved

Scalar = float | Tensor
"""A host number, or a 0-d tensor on the device of the parameters."""


@dataclass(frozen=True)
class Gate:
    """Whether to skip the step.

    Attributes:
        skip: 0-d fp32, 1 to skip the step and 0 to take it; ``None`` to take it in any case.
    """

    skip: Tensor | None = None

    @classmethod
    def of(cls, flag: Tensor | None, device: torch.device) -> Gate:
        """Returns the gate of a one-element tensor of any device; other than 0 means skip."""
        if flag is None:
            return cls()
        return cls((moved(flag, device).reshape(()) != 0).to(torch.float32))

    def coefficient(self, value: Scalar, neutral: float) -> Scalar:
        """Returns ``value``, or ``neutral`` if the step is skipped."""
        if self.skip is None:
            return value
        value = value if isinstance(value, Tensor) else torch.full_like(self.skip, value)
        return torch.where(self.skip != 0, neutral, value.to(torch.float32))

    def gradients(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns ``tensors``, or zeros if the step is skipped."""
        if self.skip is None:
            return list(tensors)
        skipped = self.skip != 0
        return [torch.where(skipped, 0.0, tensor) for tensor in tensors]

    def select(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> list[Tensor]:
        """Returns ``new``, or ``old`` if the step is skipped."""
        if self.skip is None:
            return list(new)
        skipped = self.skip != 0
        return [torch.where(skipped, o, n) for o, n in zip(old, new, strict=True)]

    def descend_(self, params: list[Tensor], updates: Sequence[Tensor], lr: Scalar) -> None:
        """Subtracts ``lr`` times the updates from the parameters, unless the step is skipped."""
        rate = self.coefficient(lr, 0.0)
        if isinstance(rate, Tensor):
            torch._foreach_sub_(params, torch._foreach_mul(list(updates), rate))
        else:
            torch._foreach_add_(params, list(updates), alpha=-rate)  # allocates nothing

    def unscale_(self, grads: list[Tensor], scale: Tensor) -> None:
        """Divides gradients by a one-element tensor in place, unless the step is skipped."""
        if grads:
            device = grads[0].device
            divisor = as_tensor(self.coefficient(as_tensor(scale, device), 1.0), device)
            torch.ops.aten._foreach_div_.Tensor(dtensor.locals_of(grads), dtensor.local(divisor))


def bias_correction(beta: float, step: Scalar) -> Scalar:
    """Returns ``1 - beta ** step`` for a host or device step count.

    Uses ``expm1`` on the device: in fp32, the plain form loses four digits at ``beta=0.999``.
    """
    if not isinstance(step, Tensor):
        return float(1.0 - beta**step)
    if beta == 0.0:
        return 1.0
    return -torch.expm1(step.reshape(()).to(torch.float32) * math.log(beta))


def add_(tensors: list[Tensor], value: Scalar) -> None:
    """Adds one number to all tensors, in place.

    Given a 0-d tensor, ``torch._foreach_add_`` itself would read it on the host.
    """
    if isinstance(value, Tensor):
        # On the local parts of DTensors, for which torch 2.11 lacks this operator.
        torch.ops.aten._foreach_add_.Tensor(dtensor.locals_of(tensors), dtensor.local(value))
    else:
        torch._foreach_add_(tensors, value)


def as_tensor(value: Scalar, device: torch.device) -> Tensor:
    """Returns a number or a one-element tensor as 0-d fp32 on ``device``.

    Waits only where :func:`moved` does.
    """
    if isinstance(value, Tensor):
        return moved(value, device, torch.float32).reshape(())
    # torch.as_tensor would copy from the host and wait for the copy.
    return torch.full((), value, dtype=torch.float32, device=device)


def as_scalar(value: Scalar, device: torch.device) -> Scalar:
    """Returns a host number unchanged, a one-element tensor as 0-d on ``device``."""
    return moved(value, device).reshape(()) if isinstance(value, Tensor) else value
