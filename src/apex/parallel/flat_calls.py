"""Collective calls on many tensors: flattens by type, calls once, and copies back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from apex._core.flat import flatten as flatten
from apex._core.flat import unflatten as unflatten
from apex.parallel.process_groups import require_running

Call = Callable[..., Any]

_SPLIT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def split_half_float_double(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Returns non-empty lists of the fp16, bf16, fp32 and fp64 tensors."""
    given = list(tensors)
    buckets = [[t for t in given if t.dtype is dtype] for dtype in _SPLIT_DTYPES]
    return [bucket for bucket in buckets if bucket]


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

    For ``torch.distributed.all_reduce``, divides the sum by the number of processes.

    Args:
        bucket: Tensors of one dtype and device.
        call: A function of torch.distributed that modifies its first argument in place.
        extra_args: Further arguments of ``call``.

    Raises:
        RuntimeError: If torch.distributed is not initialized.
    """
    require_running("flat_dist_call")
    args = tuple(extra_args or ())
    divisor = _divisor(call, args)
    with torch.no_grad():
        coalesced = flatten(bucket)
        call(coalesced, *args)
        if divisor != 1:
            coalesced /= divisor
        for tensor, synced in zip(bucket, unflatten(coalesced, bucket), strict=True):
            tensor.copy_(synced)


def flat_dist_call(
    tensors: Iterable[Tensor], call: Call, extra_args: Sequence[Any] | None = None
) -> None:
    """Calls ``apply_flat_dist_call`` once for each type among ``tensors``.

    Raises:
        RuntimeError: If torch.distributed is not initialized.
    """
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra_args)


def extract_tensors(maybe_tensor: Any, tensor_list: list[Tensor]) -> None:
    """Appends the tensors in nested iterables to ``tensor_list``; ignores other objects."""
    if isinstance(maybe_tensor, Tensor):
        tensor_list.append(maybe_tensor)
    elif isinstance(maybe_tensor, Iterable) and not isinstance(maybe_tensor, (str, bytes)):
        for item in maybe_tensor:
            extract_tensors(item, tensor_list)


def _divisor(call: Call, args: tuple[Any, ...]) -> int:
    """Returns the divisor of a sum; 1 for all other operations."""
    distributed = torch.distributed
    if call is not distributed.all_reduce:
        return 1
    if args and args[0] != distributed.ReduceOp.SUM:
        return 1
    return distributed.get_world_size(*args[1:2])
