"""Copies values and gradients between low-precision parameters and their fp32 masters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from apex._torch import foreach
from apex._torch.dynamo import untraced


def make_master(
    param: nn.Parameter, exact: Tensor | None = None, kind: type[nn.Parameter] = nn.Parameter
) -> nn.Parameter:
    """Returns an fp32 parameter with the value of ``param``.

    Args:
        param: A low-precision parameter.
        exact: Its value before rounding, if known; used without a copy if it is fp32 and has no
            gaps in memory, over which torch's fused kernels on a CPU would write.
        kind: Class of the result.
    """
    # Not detach(), which shares autograd's version counter: a write to the master would count as a
    # write to the model's parameter.
    value = (param.data if exact is None else exact.data).to(torch.float32)
    if not value.is_contiguous() and torch.empty_like(value).stride() != value.stride():
        value = value.clone()
    return kind(value)


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


def fp32_copies(grads: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Returns fp32 copies of gradients, with the device and memory layout of ``like``.

    Sparse ones stay sparse, with duplicate rows summed, in fp32: the 16-bit sum could overflow.
    Strides are those of ``like``, which torch's fused CPU kernels assume.
    """
    copies = [
        grad.to(device=each.device, dtype=torch.float32).coalesce()
        if grad.is_sparse
        else torch.empty_like(each, dtype=torch.float32, requires_grad=False)
        for grad, each in zip(grads, like, strict=True)
    ]
    dense = [i for i, grad in enumerate(grads) if not grad.is_sparse]
    if dense:
        foreach.assign_([copies[i] for i in dense], [grads[i] for i in dense])
    return copies
