"""What an optimizer that unscales by itself asks of ``torch.amp.GradScaler``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from apex._torch.copies import moved


def signals(scaler: Any, optimizer: Optimizer) -> tuple[Tensor | None, Tensor | None]:
    """Returns the divisor of the gradients, and the flag that skips the step.

    Does what ``GradScaler.step`` does for an optimizer that takes no ``grad_scaler`` argument. Does
    not wait for the device.

    Args:
        scaler: The ``torch.amp.GradScaler`` that scaled the gradients.
        optimizer: Holds the parameters.
    """
    if not scaler.is_enabled():
        return None, None
    state = scaler._per_optimizer_states[id(optimizer)]
    unscaled = state["stage"] is OptState.UNSCALED
    flags = None if unscaled else scaler._check_inf_per_device(optimizer)
    found = list((flags or state["found_inf_per_device"]).values())
    total = torch.stack([moved(flag.reshape(()), found[0].device) for flag in found]).sum()
    return None if unscaled else scaler._get_scale_async(), total
