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
    sides = zip(models, masters, strict=True)
    received = [(grad, master) for model, master in sides if (grad := model.grad) is not None]
    copies = fp32_copies(*zip(*received, strict=True)) if received else []
    for master in masters:
        master.grad = None
    for (_, master), copy in zip(received, copies, strict=True):
        master.grad = copy
    return copies
