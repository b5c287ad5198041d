"""What an optimizer's fused kernels do by themselves: read the gradients, and skip the step."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from apex._core.param_groups import params_of
from apex._torch.dynamo import untraced

_FUSED_CLASSES = (SGD, Adagrad, AdamW, Adam)


def _fused_class(optimizer: Optimizer) -> type[Optimizer] | None:
    """Returns torch's class whose fused kernel steps every group; ``None`` if there is none."""
    for group in optimizer.param_groups:
        if not group.get("fused"):
            return None
    for fused_class in _FUSED_CLASSES:
        if issubclass(type(optimizer), fused_class):
            return fused_class
    return None


def reads_gradients_in_kernels(optimizer: Optimizer) -> bool:
    """Returns whether only torch's fused kernels read the values of gradients in its step.

    Optimizers of other classes declare it by ``gradients_in_kernels`` in the class itself, as a
    subclass may read them elsewhere.
    """
    own: Any = optimizer.__class__  # not the class that amp generates
    return own is _fused_class(optimizer) or bool(vars(own).get("gradients_in_kernels"))


@untraced
def skips_in_kernel(optimizer: Optimizer, found_inf: Tensor) -> bool:
    """Returns whether the optimizer's step reads ``found_inf`` on the device and skips by itself.

    torch's fused optimizers do if every group is fused. So do other optimizers that declare
    ``_step_supports_amp_scaling``. A step with an argument ``grad_scaler`` does not: it asks the
    scaler.
    """
    # torch's fused optimizers copy it to CPU parameters without synchronizing (torch 2.13).
    if found_inf.device.type != "cpu":
        for param in params_of(optimizer):
            if param.device.type == "cpu":
                return False
    # A copied or unpickled torch optimizer loses the declaration but keeps its fused kernels.
    fused_class = _fused_class(optimizer)
    if fused_class is not None:
        return fused_class is not SGD or not _starts_momentum(optimizer)
    declared = getattr(optimizer, "_step_supports_amp_scaling", False)
    fused = declared and all(group.get("fused", True) for group in optimizer.param_groups)
    own: Any = optimizer.__class__
    return fused and "grad_scaler" not in inspect.signature(own.step).parameters


def _starts_momentum(optimizer: Optimizer) -> bool:
    # torch's fused SGD kernel leaves the momentum uninitialized if it skips the first step, and the
    # next step uses it (torch 2.13). So the host decides whether a group's first step is skipped.
    state = optimizer.state
    for group in optimizer.param_groups:
        states = [state[param] for param in group["params"] if param in state]
        if group["momentum"] != 0 and not any("momentum_buffer" in kept for kept in states):
            return True
    return False
