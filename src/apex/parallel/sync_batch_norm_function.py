"""Differentiable batch norm with statistics over several processes, for devices other than GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from apex._core.foreach.working import math_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Sum(Function):
    """The sum over processes; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        total = own.clone()
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
    running: tuple[Tensor, Tensor, float] | None,
    eps: float,
    group: ProcessGroup,
) -> Tensor:
    """Returns ``x`` normalized with the statistics of the batches of all processes in ``group``.

    Statistics and arithmetic are fp32 (fp64 for fp64); the result has the dtype of ``x``. Batch
    sizes may differ between processes and may be 0. Gradients of ``weight`` and ``bias`` are those
    of this process; data-parallel training averages them.

    Args:
        x: ``[N, C, ...]``.
        weight: ``[C]``, of any floating-point dtype.
        bias: ``[C]``, of any floating-point dtype.
        running: Running mean and variance to update in place, and the weight of this batch.
        eps: Term added to the variance.
        group: The processes.

    Raises:
        ValueError: If there is only one value per channel.
    """
    wide, shape = x.to(math_dtype(x)), (1, -1, *(1 for _ in x.shape[2:]))
    dims = [dim for dim in range(x.dim()) if dim != 1]
    values = x.numel() // x.size(1)
    own = torch.cat([wide.sum(dims), wide.new_full((1,), values)])
    total: Tensor = _Sum.apply(own, group)  # type: ignore[no-untyped-call]
    count = total[-1].detach()
    if count == 1:  # sync: on the host already
        raise ValueError(
            f"SyncBatchNorm got one value per channel over all processes (input {tuple(x.shape)} "
            "here) in training, which has no variance. Use larger batches, or call eval() on the "
            "layer."
        )
    divisor = count.clamp(min=1.0)
    mean = total[:-1] / divisor
    # The mean comes first: E[x^2] - E[x]^2 would cancel.
    centered = wide - mean.view(shape)
    squares: Tensor = _Sum.apply(centered.square().sum(dims), group)  # type: ignore[no-untyped-call]
    var = squares / divisor
    if running is not None:
        unbiased = var * (count / (count - 1.0).clamp(min=1.0))
        share = (count > 0).to(var.dtype) * running[2]  # empty batches move nothing
        with torch.no_grad():
            for buffer, fresh in ((running[0], mean), (running[1], unbiased)):
                buffer.copy_(torch.lerp(buffer.to(fresh.dtype), fresh, share))
    result = centered * torch.rsqrt(var + eps).view(shape)
    if weight is not None:
        result = result * weight.to(wide.dtype).view(shape)
    if bias is not None:
        result = result + bias.to(wide.dtype).view(shape)
    return result.to(x.dtype)
