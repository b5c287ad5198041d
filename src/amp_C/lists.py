"""What multi-tensor functions share: argument checks, made before anything changes, and copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from apex._core.foreach.gate import Gate
from apex._core.foreach.working import store

TensorLists = Sequence[Sequence[Tensor]]


def checked(name: str, noop_flag: Tensor, lists: TensorLists, *counts: int) -> list[list[Tensor]]:
    """Returns the validated lists; raises before anything changes.

    Tensors of one position that differ in shape but not in number of elements become flat views.

    Args:
        name: Name of the calling function, for error messages.
        noop_flag: Its flag.
        lists: Its tensor lists.
        counts: How many lists it takes.

    Raises:
        TypeError: If something is no dense floating-point tensor.
        ValueError: If lists, sizes or devices do not fit.
    """
    lengths = [len(tensors) for tensors in lists]
    if len(lists) not in counts or len({*lengths}) > 1:
        accepted = " or ".join(str(count) for count in counts)
        raise ValueError(
            f"{name} got lists of {lengths} tensors; it takes {accepted} lists of one length, with "
            "one position for each parameter."
        )
    for tensor in (noop_flag, *(tensor for tensors in lists for tensor in tensors)):
        _check_tensor(name, noop_flag, tensor)
    positions = [_fitted(name, position) for position in zip(*lists, strict=True)]
    return [list(each) for each in zip(*positions, strict=True)] or [list(each) for each in lists]


def store_copies(copies: list[Tensor], params: list[Tensor], gate: Gate) -> None:
    """Writes the rounded parameters into their copies, unless the step is skipped."""
    rounded = [param.to(copy.dtype) for param, copy in zip(params, copies, strict=True)]
    store(copies, gate.select(copies, rounded))


def set_noop_(noop_flag: Tensor, found: Tensor) -> None:
    """Sets the flag to 1 if ``found`` (0-d) is non-zero, on the device."""
    found = (found != 0).to(noop_flag.dtype).reshape(noop_flag.shape)
    torch.maximum(noop_flag, found, out=noop_flag)


def _check_tensor(name: str, noop_flag: Tensor, tensor: Any) -> None:
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
        given = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(
            f"{name} got {given}; it takes dense tensors. Omit parameters without a gradient from "
            "every list. The overflow flag is torch.zeros(1, dtype=torch.int32, device=...)."
        )
    if tensor is not noop_flag and not tensor.is_floating_point():
        raise TypeError(f"{name} takes floating-point tensors; it got one of {tensor.dtype}.")
    if tensor.device != noop_flag.device or noop_flag.numel() != 1:
        raise ValueError(
            f"{name} got a tensor on {tensor.device} and an overflow flag of {noop_flag.numel()} "
            f"elements on {noop_flag.device}. Call it once per device, with a flag of one element "
            "there."
        )


def _fitted(name: str, position: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    first = position[0]
    if all(tensor.shape == first.shape for tensor in position):
        return position
    same_size = all(tensor.numel() == first.numel() for tensor in position)
    if not same_size or not all(tensor.is_contiguous() for tensor in position):
        raise ValueError(
            f"{name} got tensors of shapes {[tuple(tensor.shape) for tensor in position]} in one "
            "position; they must have the same shape, or be contiguous with the same number of "
            "elements."
        )
    return tuple(tensor.view(-1) for tensor in position)
