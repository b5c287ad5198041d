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
    if state["stage"] is OptState.UNSCALED:
        divisor = None
        by_device = state["found_inf_per_device"]
    else:
        divisor = scaler._get_scale_async()
        by_device = scaler._check_inf_per_device(optimizer) or state["found_inf_per_device"]
    flags = list(by_device.values())
    return divisor, torch.stack([moved(flag.reshape(()), flags[0].device) for flag in flags]).sum()
