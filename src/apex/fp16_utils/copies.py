"""Copies values and gradients between parameters and masters that are held as lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from apex._engine.masters import fp32_copies
from apex._torch import foreach
from apex._torch.dynamo import untraced


@untraced
@torch.no_grad()
def copy_to_model(masters: Sequence[Tensor], models: Sequence[Tensor]) -> None:
    """Writes each master's rounded value into its model parameter."""
    if masters:
        foreach.copy_(models, masters)


def copy_grads(models: Sequence[nn.Parameter], masters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Gives each master an fp32 copy of its parameter's gradient, or none; returns the copies."""
    grads: list[Tensor] = []
    receivers: list[nn.Parameter] = []
    for model, master in zip(models, masters, strict=True):
        grad = model.grad
        master.grad = None
        if grad is not None:
            grads.append(grad)
            receivers.append(master)
    copies = fp32_copies(grads, receivers)
    for master, copy in zip(receivers, copies, strict=True):
        master.grad = copy
    return copies
