"""``torch.amp.GradScaler``: its signals to optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from apex._torch.copies import moved


def signals(scaler: Any, optimizer: Optimizer) -> tuple[Tensor | None, Tensor | None]:
    """Returns the divisor of the gradients, if any, and the flag to skip the step, if any.

    ``GradScaler.step`` sets the same values on optimizers that take no ``grad_scaler`` argument.
    Does not wait for the device. A scaler that has scaled nothing gives neither.
    """
    if not scaler.is_enabled() or scaler._scale is None:
        return None, None
    state = scaler._per_optimizer_states[id(optimizer)]
    unscaled = state["stage"] is OptState.UNSCALED
    flags = None if unscaled else scaler._check_inf_per_device(optimizer)
    found = list((flags or state["found_inf_per_device"]).values())
    total = torch.stack([moved(flag.reshape(()), found[0].device) for flag in found]).sum()
    return None if unscaled else scaler._get_scale_async(), total
