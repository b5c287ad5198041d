"""Differentiable batch norm with statistics over several processes, on any device.

Counts, means and variances of the processes are combined with the formula of Chan, Golub and
LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979. It is
exact for any batch sizes and avoids the cancellation of E[x^2] - E[x]^2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from apex._core.foreach.working import math_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Running(NamedTuple):
    """Running statistics, updated in place with weight ``momentum``."""

    mean: Tensor
    var: Tensor
    momentum: float


class Moments(NamedTuple):
    """Mean and biased variance per channel ``[C]``, and the number of values per channel (0-d)."""

    mean: Tensor
    var: Tensor
    total: Tensor


def sync_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: Running | None,
    eps: float,
    group: ProcessGroup | None,
) -> Tensor:
    """Returns ``x`` normalized with the statistics of the batches of all processes in ``group``.

    Statistics and arithmetic are fp32 (fp64 for fp64); the result has the dtype of ``x``. Batch
    sizes may differ between processes and may be 0. Gradients of ``weight`` and ``bias`` are those
    of this process; data-parallel training averages them.

    Args:
        x: ``[N, C, ...]``.
        weight: ``[C]``, of any floating-point dtype.
        bias: ``[C]``, of any floating-point dtype.
        running: Running statistics to update with those of the combined batch.
        eps: Term added to the variance.
        group: The processes; ``None`` for this process alone.

    Raises:
        ValueError: If there is only one value per channel (not checked on GPUs, where reading the
            count would sync).
    """
    # The parameters are cast here so that autograd casts their gradients back.
    dtype = math_dtype(x)
    weight = None if weight is None else weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    result: Tensor = _SyncBatchNorm.apply(x, weight, bias, running, eps, group)  # type: ignore[no-untyped-call]
    return result


class _SyncBatchNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: Running | None,
        eps: float,
        group: ProcessGroup | None,
    ) -> Tensor:
        x = _dense(x)
        moments = _joined(_local_moments(x, eps), group)
        _require_two_values(moments, x)
        if running is not None:
            _move(running, moments)
        ctx.save_for_backward(x, weight, *moments)
        ctx.eps, ctx.group = eps, group
        return _normalized(x, moments, weight, bias, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *saved = ctx.saved_tensors
        moments = Moments(*saved)
        invstd = torch.rsqrt(moments.var + ctx.eps)
        grad = _dense(grad)
        grad_sum, grad_dot = _local_sums(x, grad, moments, invstd)
        # This process's share, which data-parallel training averages later.
        grad_weight = grad_dot * invstd if ctx.needs_input_grad[1] else None
        grad_bias = grad_sum.clone() if ctx.needs_input_grad[2] else None
        grad_x = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([grad_sum, grad_dot])
            if ctx.group is not None:
                torch.distributed.all_reduce(sums, group=ctx.group)
            grad_x = _input_grad(x, grad, moments, invstd, weight, sums)
        return grad_x, grad_weight, grad_bias, None, None, None


# -- over processes --------------------------------------------------------------------------


def _joined(own: Tensor, group: ProcessGroup | None) -> Moments:
    """Returns the moments of the combined batch from those of every process, in one tensor."""
    every = own.unsqueeze(0)
    if group is not None:
        every = own.new_empty(torch.distributed.get_world_size(group), own.numel())
        torch.distributed.all_gather(list(every.unbind(0)), own, group=group)
    channels = own.numel() // 2
    means, variances, counts = torch.split(every, [channels, channels, 1], dim=1)
    count = counts.sum()
    divisor = count.clamp(min=1.0)
    mean = (means * counts).sum(0) / divisor
    var = ((variances + (means - mean).square()) * counts).sum(0) / divisor
    return Moments(mean, var, count)


def _require_two_values(moments: Moments, x: Tensor) -> None:
    if moments.total.device.type == "cpu" and moments.total == 1:
        raise ValueError(
            f"SyncBatchNorm got one value per channel over all processes (input "
            f"{tuple(x.shape)} here) in training, which has no variance. Use larger batches, or "
            "call eval() on the layer."
        )


def _move(running: Running, moments: Moments) -> None:
    unbiased = moments.var * (moments.total / (moments.total - 1.0).clamp(min=1.0))
    # If all batches are empty, the statistics stay unchanged.
    share = (moments.total > 0).to(moments.mean.dtype) * running.momentum
    for buffer, fresh in ((running.mean, moments.mean), (running.var, unbiased)):
        buffer.copy_(torch.lerp(buffer.to(fresh.dtype), fresh, share))


# -- in this process -------------------------------------------------------------------------
# Only CUDA has kernels for the four steps; they read 16-bit inputs without an fp32 copy.


def _local_moments(x: Tensor, eps: float) -> Tensor:
    """Returns mean, variance and number of values of each channel, ``[2 * C + 1]``."""
    count = torch.full((1,), x.numel() // x.size(1), dtype=math_dtype(x), device=x.device)
    if x.numel() == 0:
        return count.new_zeros(2 * x.size(1) + 1)
    if x.is_cuda:
        mean, invstd = torch.batch_norm_stats(x, eps)
        var = invstd.pow(-2).sub_(eps).clamp_(min=0.0)
    else:
        var, mean = torch.var_mean(x.to(math_dtype(x)), _other_dims(x), correction=0)
    return torch.cat([mean, var, count])


def _normalized(
    x: Tensor, moments: Moments, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    if x.numel() == 0:
        return torch.empty_like(x)
    if x.is_cuda:
        invstd = torch.rsqrt(moments.var + eps)
        return torch.batch_norm_elemt(x, weight, bias, moments.mean, invstd, eps)
    return F.batch_norm(x, moments.mean, moments.var, weight, bias, False, 0.0, eps)


def _local_sums(x: Tensor, grad: Tensor, moments: Moments, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sums of ``grad`` and of ``grad * (x - mean)`` per channel."""
    if x.is_cuda and x.numel() > 0:
        grad_sum, grad_dot, _, _ = torch.batch_norm_backward_reduce(
            grad, x, moments.mean, invstd, None, True, False, False
        )
        return grad_sum, grad_dot
    exact, dims = math_dtype(x), _other_dims(x)
    grad = grad.to(exact)
    centered = x.to(exact) - _spread(moments.mean, x)
    return grad.sum(dims), (grad * centered).sum(dims)


def _input_grad(
    x: Tensor, grad: Tensor, moments: Moments, invstd: Tensor, weight: Tensor | None, sums: Tensor
) -> Tensor:
    if x.numel() == 0:
        return torch.zeros_like(x)
    if x.is_cuda:
        count = moments.total.to(torch.int32).reshape(1)
        return torch.batch_norm_backward_elemt(
            grad, x, moments.mean, invstd, weight, sums[0], sums[1], count
        )
    exact = math_dtype(x)
    grad_mean, dot_mean = sums / moments.total
    slope = dot_mean * invstd.square()
    centered = x.to(exact) - _spread(moments.mean, x)
    factor = invstd if weight is None else invstd * weight
    result = grad.to(exact) - _spread(grad_mean, x) - centered * _spread(slope, x)
    return (result * _spread(factor, x)).to(x.dtype)


def _other_dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _spread(per_channel: Tensor, x: Tensor) -> Tensor:
    return per_channel.view(-1, *([1] * (x.dim() - 2)))


def _dense(x: Tensor) -> Tensor:
    """Returns ``x`` in a layout that the kernels support: channels first or last."""
    for layout in (torch.channels_last, torch.channels_last_3d):
        if x.is_contiguous(memory_format=layout):
            return x
    return x.contiguous()
