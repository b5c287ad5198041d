"""Differentiable batch norm with statistics over several processes, for devices other than GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from apex._core.dtypes import math_dtype


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
        return _sum_over(ctx.group, grad.contiguous()), None


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
    sizes may differ between processes and may be 0. Gradients of ``weight`` and ``bias`` come from
    this process only; data-parallel training averages them.

    Args:
        x: ``[N, C, ...]``.
        weight: ``[C]``, of any floating-point dtype.
        bias: ``[C]``, of any floating-point dtype.
        running_mean: ``[C]``, updated in place; None without running statistics.
        running_var: ``[C]``, updated in place; None without running statistics.
        eps: Term added to the variance.
        momentum: Weight of this batch in the running statistics.
        group: The processes.

    Raises:
        ValueError: If there is only one value per channel.
    """
    wide = x.to(math_dtype(x))
    dims = [0, *range(2, x.dim())]
    sums = wide.sum(dims)
    values_per_channel = wide.new_full((1,), x.numel() // x.size(1))
    total = _sum_over(group, torch.cat([sums, values_per_channel]))
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
    channels = [1] * x.dim()
    channels[1] = -1
    centered = wide - mean.view(channels)
    squares = _sum_over(group, centered.square().sum(dims))
    var = squares / divisor
    if running_mean is not None and running_var is not None and count > 0:  # sync: as above
        with torch.no_grad():
            unbiased_var = squares / (count - 1.0)
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased_var.to(running_var.dtype), momentum)
    inverse_deviation = torch.rsqrt(var + eps)
    result = centered * inverse_deviation.view(channels)
    if weight is not None:
        wide_weight = weight.to(wide.dtype)
        result = result * wide_weight.view(channels)
    if bias is not None:
        wide_bias = bias.to(wide.dtype)
        result = result + wide_bias.view(channels)
    return result.to(x.dtype)


def _sum_over(group: torch.distributed.ProcessGroup, part: Tensor) -> Tensor:
    total: Tensor = _Sum.apply(part, group)  # type: ignore[no-untyped-call]
    return total
