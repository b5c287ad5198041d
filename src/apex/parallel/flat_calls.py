"""Collective calls on many tensors, flattened by type, and averages of gradients on request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from apex._core.flat import flatten, unflatten
from apex.parallel.gradient_reduction import GradientReduction, reduce_gradients

Call = Callable[..., Any]


def split_half_float_double(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Returns non-empty lists of the fp16, bf16, fp32 and fp64 tensors."""
    buckets = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        bucket = [tensor for tensor in tensors if tensor.dtype is dtype]
        if bucket:
            buckets.append(bucket)
    return buckets


def split_by_type(tensors: Iterable[Tensor]) -> OrderedDict[str, list[Tensor]]:
    """Groups the tensors by ``tensor.type()``: device type and dtype."""
    buckets: OrderedDict[str, list[Tensor]] = OrderedDict()
    for tensor in tensors:
        buckets.setdefault(tensor.type(), []).append(tensor)
    return buckets


def apply_flat_dist_call(
    bucket: Sequence[Tensor], call: Call, extra_args: Sequence[Any] | None = None
) -> None:
    """Calls a collective once on all elements of ``bucket`` and writes the result back.

    After ``torch.distributed.all_reduce``, divides by the number of processes.

    Args:
        bucket: Tensors of one dtype and device.
        call: A function of torch.distributed that modifies its first argument in place.
        extra_args: Further arguments of ``call``.
    """
    with torch.no_grad():
        coalesced = flatten(bucket)
        call(coalesced, *(extra_args or ()))
        if call is torch.distributed.all_reduce:
            coalesced /= torch.distributed.get_world_size()
        results = unflatten(coalesced, bucket)
        torch._foreach_copy_([*bucket], results)


def flat_dist_call(
    tensors: Iterable[Tensor], call: Call, extra_args: Sequence[Any] | None = None
) -> None:
    """Calls ``apply_flat_dist_call`` once for each type among ``tensors``."""
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra_args)


def extract_tensors(maybe_tensor: Any, tensor_list: list[Tensor]) -> None:
    """Appends the tensors in nested iterables to ``tensor_list``; ignores other objects."""
    if isinstance(maybe_tensor, Tensor):
        tensor_list.append(maybe_tensor)
    elif isinstance(maybe_tensor, Iterable) and not isinstance(maybe_tensor, (str, bytes)):
        for item in maybe_tensor:
            extract_tensors(item, tensor_list)


class Reducer:
    """Averages gradients over all processes at each call of ``reduce``.

    For a module, the constructor also broadcasts rank 0's parameters to all processes. For
    gradients, the script must broadcast the parameters.

    Attributes:
        module: The module, or ``None``.
        grads: The gradients, if there is no module.
    """

    def __init__(self, module_or_grads_list: Any) -> None:
        """Accepts a module, or gradients in nested iterables.

        Raises:
            TypeError: If the argument is not a module and contains no tensor.
        """
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            flat_dist_call(self.module.parameters(), torch.distributed.broadcast, (0,))
            return
        extract_tensors(module_or_grads_list, self.grads)
        if not self.grads:
            raise TypeError(
                f"apex.parallel.Reducer got {type(module_or_grads_list).__name__} without a "
                "tensor; it takes a module or an iterable of gradients."
            )

    def reduce(self) -> None:
        """Averages the gradients in place. Every process must call it."""
        if self.module is None:
            flat_dist_call(self.grads, torch.distributed.all_reduce)
            return
        params = [param for param in self.module.parameters() if param.requires_grad]
        reduce_gradients(params, GradientReduction())
