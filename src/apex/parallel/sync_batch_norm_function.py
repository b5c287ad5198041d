"""Differentiable batch norm with statistics over several processes, for devices other than GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from apex._core.foreach.working import math_dtype


class _Sum(Function):
    """The sum over processes; its gradient is the sum of the gradients in all processes."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        total = part.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total: Tensor = _Sum.apply(grad.contiguous(), ctx.group)  # type: ignore[no-untyped-call]
        return total, None


def sync_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    eps: float,
    momentum: float,
    group: torch.distributed.ProcessGroup,
) -> Tensor:
    """Returns ``x`` normalized with the statistics of the batches of all processes in ``group``.

    Statistics and arithmetic are fp32 (fp64 for fp64); the result has the dtype of ``x``. Batch
    sizes may differ between processes and may be 0. Gradients of ``weight`` and ``bias`` are those
    of this process; data-parallel training averages them.

    Args:
        x: ``[N, C, ...]``.
        weight: ``[C]``, of any floating-point dtype.
        bias: ``[C]``, of any floating-point dtype.
        running_mean: ``[C]``, updated in place; None without running statistics.
        running_var: Likewise.
        eps: Term added to the variance.
        momentum: Weight of this batch in the running statistics.
        group: The processes.

    Raises:
        ValueError: If there is only one value per channel.
    """
    wide = x.to(math_dtype(x))
    shape = (1, -1, *(1 for _ in x.shape[2:]))
    dims = [dim for dim in range(x.dim()) if dim != 1]
    sums = wide.sum(dims)
    values_per_channel = wide.new_full((1,), x.numel() // x.size(1))
    total: Tensor = _Sum.apply(torch.cat([sums, values_per_channel]), group)  # type: ignore[no-untyped-call]
    count = total[-1].detach()
    if count == 1:  # sync: these tensors are on the CPU
        raise ValueError(
            f"SyncBatchNorm got one value per channel over all processes (input {tuple(x.shape)} "
            "here) in training, which has no variance. Use larger batches, or call eval() on the "
            "layer."
        )
    divisor = count.clamp(min=1.0)
    mean = total[:-1] / divisor
    # Two passes over the data, because E[x^2] - E[x]^2 would cancel.
    centered = wide - mean.view(shape)
    squares: Tensor = _Sum.apply(centered.square().sum(dims), group)  # type: ignore[no-untyped-call]
    var = squares / divisor
    if running_mean is not None and running_var is not None and count > 0:  # sync: as above
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            unbiased = squares / (count - 1.0)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    result = centered * torch.rsqrt(var + eps).view(shape)
    if weight is not None:
        result = result * weight.to(wide.dtype).view(shape)
    if bias is not None:
        result = result + bias.to(wide.dtype).view(shape)
    return result.to(x.dtype)
