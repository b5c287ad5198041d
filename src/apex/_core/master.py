"""Copies values and gradients between low-precision parameters and their fp32 masters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from apex._torch import dtensor, foreach
from apex._torch.dynamo import untraced


def make_master(
    param: nn.Parameter, exact: Tensor | None = None, kind: type[nn.Parameter] = nn.Parameter
) -> nn.Parameter:
    """Returns an fp32 parameter with the value of ``param``.

    Args:
        param: A low-precision parameter.
        exact: Its value before rounding, if known; used without a copy if it is fp32 and has no
            gaps in memory, over which torch's fused kernels on a CPU would write.
        kind: Class of the result; always ``nn.Parameter`` for a DTensor.
    """
    # Not detach(), which shares autograd's version counter: a write to the master would count as a
    # write to the model's parameter.
    value = (param.data if exact is None else exact.data).to(torch.float32)
    if not value.is_contiguous() and torch.empty_like(value).stride() != value.stride():
        value = value.clone()
    return nn.Parameter(value) if dtensor.is_dtensor(value) else kind(value)


@untraced
@torch.no_grad()
def copy_to_model(masters: Sequence[Tensor], models: Sequence[Tensor]) -> None:
    """Writes each master's rounded value into its model parameter."""
    if masters:
        torch._foreach_copy_(dtensor.locals_of(models), dtensor.locals_of(masters))


def copy_grads(models: Sequence[nn.Parameter], masters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Gives each master an fp32 copy of its parameter's gradient, or none; returns the copies."""
    sides = zip(models, masters, strict=True)
    received = [(grad, *both) for both in sides if (grad := both[0].grad) is not None]
    copies = fp32_copies(*zip(*received, strict=True)) if received else []
    for master in masters:
        master.grad = None
    for (_, _, master), copy in zip(received, copies, strict=True):
        master.grad = copy
    return copies


def fp32_copies(
    grads: Sequence[Tensor], params: Sequence[Tensor], like: Sequence[Tensor]
) -> list[Tensor]:
    """Returns fp32 copies of gradients, with the device and memory layout of ``like``.

    Sparse ones stay sparse, with duplicate rows summed. A DTensor gets its parameter's placements.
    """
    if not dtensor.any_dtensor(params) and {grad.layout for grad in grads} <= {torch.strided}:
        return _fp32_copies_like(list(grads), like)
    result: list[Tensor] = []
    for grad, param, layout in zip(grads, params, like, strict=True):
        if grad.is_sparse:
            # Rows are summed in fp32: in 16 bits, the sum of duplicates could overflow.
            result.append(grad.to(device=layout.device, dtype=torch.float32).coalesce())
        elif not dtensor.same_layout(param, grad):
            # Ranks are summed in fp32, too.
            result.append(dtensor.laid_out_as(param, grad.to(torch.float32)))
        else:
            result += _fp32_copies_like([grad], [layout])
    return result


def _fp32_copies_like(grads: list[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    # Strides as in ``like``: torch's fused CPU kernels assume those of the parameter.
    copies = [
        torch.empty_like(each)  # 0.4 us faster
        if each.dtype is torch.float32
        else torch.empty_like(each, dtype=torch.float32)
        for each in like
    ]
    if copies:
        foreach.assign_(dtensor.locals_of(copies), dtensor.locals_of(grads))
    return copies


def sums(values: Sequence[Tensor], addends: Sequence[Tensor | None]) -> list[Tensor]:
    """Returns ``values[i] + addends[i]``; where both are dense, adds in place to ``values[i]``.

    ``None`` adds nothing. Does not modify the addends.
    """
    result = list(values)
    targets: list[Tensor] = []
    dense: list[Tensor] = []
    for index, (value, addend) in enumerate(zip(values, addends, strict=True)):
        if addend is None:
            continue
        if value.is_sparse:
            result[index] = addend + value  # torch adds sparse to dense, not dense to sparse
        elif addend.is_sparse:
            result[index] = value + addend
        else:
            targets.append(value)
            dense.append(addend)
    if targets:
        torch._foreach_add_(dtensor.locals_of(targets), dtensor.locals_of(dense))
    return result
