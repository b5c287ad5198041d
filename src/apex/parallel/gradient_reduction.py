"""The sum of gradients over processes: its dtype and divisors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from apex._core.arguments import is_number
from apex._core.flat import flatten, unflatten
from apex._torch.copies import moved


@dataclass(frozen=True)
class GradientReduction:
    """The all-reduce of one flat buffer of gradients.

    Attributes:
        group: The processes; ``None`` for all.
        always_fp32: Whether to send and sum 16-bit gradients in fp32.
        average: Whether to divide the sum by the number of processes.
        predivide_factor: Divisor before the sum, multiplier after it (only with ``average``).

    Raises:
        ValueError: If the predivide factor is not positive.
    """

    group: torch.distributed.ProcessGroup | None = None
    always_fp32: bool = False
    average: bool = True
    predivide_factor: float = 1.0

    def __post_init__(self) -> None:
        if not (is_number(self.predivide_factor) and self.predivide_factor > 0.0):
            raise ValueError(
                f"gradient_predivide_factor is {self.predivide_factor!r}; it must be a positive "
                "number, such as the square root of the number of processes."
            )

    @property
    def is_plain(self) -> bool:
        """Whether this is the plain average that torch's own data parallelism computes."""
        return self.average and not self.always_fp32 and self.predivide_factor == 1.0

    def blocking(self, buffer: Tensor) -> Tensor:
        """Reduces ``buffer`` in place and returns it."""
        message = self._message(buffer)
        torch.distributed.all_reduce(message, group=self.group)
        return _write_back(message, buffer, self._factor_after)

    def in_background(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Reduces a ``GradBucket`` asynchronously, as a communication hook."""
        buffer: Tensor = bucket.buffer()
        message = self._message(buffer)
        work: Any = torch.distributed.all_reduce(message, group=self.group, async_op=True)
        future: torch.futures.Future[Any] = work.get_future()
        # The callback must not hold the group: the group's own thread releases the callback, and
        # that thread cannot destroy the group.
        factor = self._factor_after

        def write_back(done: torch.futures.Future[Any]) -> Tensor:
            sums = done.value()  # a list, here of one tensor
            return _write_back(sums[0], buffer, factor)

        return future.then(write_back)

    def _message(self, buffer: Tensor) -> Tensor:
        """Returns the tensor to send: ``buffer`` or its copy in fp32, divided in place."""
        if self.always_fp32 and buffer.element_size() < 4:
            buffer = buffer.float()
        if self.predivide_factor != 1.0:
            buffer.mul_(1.0 / self.predivide_factor)
        return buffer

    @property
    def _factor_after(self) -> float:
        if not self.average:
            return 1.0
        return self.predivide_factor / torch.distributed.get_world_size(self.group)


def _write_back(message: Tensor, buffer: Tensor, factor: float) -> Tensor:
    if factor != 1.0:
        message.mul_(factor)
    if message.dtype is buffer.dtype:
        return message
    return buffer.copy_(message)


@torch.no_grad()
def reduce_gradients(params: Sequence[nn.Parameter], reduction: GradientReduction) -> None:
    """Reduces the gradients of ``params`` over processes in one call per dtype and device.

    They are sent in the dtype of their parameters, as a process may have accumulated some in fp32.
    A parameter without a gradient in some processes counts as zero there. One without a gradient in
    all processes keeps its ``grad``.

    Args:
        params: The same parameters, in the same order, in every process.
        reduction: The sum.

    Raises:
        RuntimeError: If a gradient is sparse.
    """
    buckets: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for param in params:
        if param.grad is not None and param.grad.is_sparse:
            raise RuntimeError(
                f"A parameter of shape {tuple(param.shape)} has a sparse gradient, which cannot "
                "be reduced at the end of the backward pass. Use DistributedDataParallel with "
                "delay_allreduce=False, or an embedding with sparse=False."
            )
        buckets.setdefault((param.device, param.dtype), []).append(param)
    for bucket in buckets.values():
        _reduce_bucket(bucket, reduction)


def _reduce_bucket(params: list[nn.Parameter], reduction: GradientReduction) -> None:
    """Reduces the gradients of parameters with one dtype and device."""
    first = params[0]
    grads = []
    has_grad = []
    for param in params:
        grad = param.grad
        has_grad.append(grad is not None)
        if grad is None:
            grad = torch.zeros_like(param)
        grads.append(grad)
    marks = torch.tensor(has_grad, dtype=first.dtype, device="cpu")
    # One message carries the gradients and, behind them, a mark per parameter.
    parts = [grad.to(first.dtype) for grad in grads]
    parts.append(moved(marks, first.device))
    message = reduction.blocking(flatten(parts))
    *totals, marks = unflatten(message, parts)
    if not all(has_grad):
        has_grad = marks.ne(0).tolist()  # sync: only if a parameter has no gradient here
    for param, grad, total, is_reduced in zip(params, grads, totals, has_grad, strict=True):
        if is_reduced:
            # As in apex, through data, so that the write does not count as an edit of the gradient.
            grad.data.copy_(total)
            param.grad = grad
