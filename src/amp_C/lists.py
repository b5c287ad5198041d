"""What multi-tensor functions share: argument checks, made before anything changes, and copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex._core.foreach.gate import Gate
from apex._core.foreach.working import store

TensorLists = Sequence[Sequence[Tensor]]


def checked(
    name: str, noop_flag: Tensor, tensor_lists: TensorLists, *counts: int
) -> list[list[Tensor]]:
    """Returns the validated lists; raises before anything changes.

    Tensors of one position that differ in shape but not in number of elements become flat views.

    Args:
        name: Name of the calling function, for error messages.
        noop_flag: Its flag.
        tensor_lists: Its tensor lists.
        counts: How many lists it takes.

    Raises:
        TypeError: If something is no tensor, or no dense floating one.
        ValueError: If lists, sizes or devices do not fit.
    """
    _check_flag(name, noop_flag)
    lists = [list(tensors) for tensors in tensor_lists]
    if len(lists) not in counts:
        accepted = " or ".join(str(count) for count in counts)
        raise ValueError(f"{name} got {len(lists)} tensor lists; it takes {accepted}.")
    lengths = [len(tensors) for tensors in lists]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"{name} got tensor lists of {lengths} tensors; they must be equally long, "
            "one position for each parameter."
        )
    for tensors in lists:
        for tensor in tensors:
            _check_tensor(name, noop_flag, tensor)
    positions = [_fitted(name, position) for position in zip(*lists, strict=True)]
    return [list(column) for column in zip(*positions, strict=True)] if positions else lists


def store_copies(copies: list[Tensor], params: list[Tensor], gate: Gate) -> None:
    """Writes the rounded parameters into their copies, unless the step is skipped."""
    rounded = [param.to(copy.dtype) for param, copy in zip(params, copies, strict=True)]
    store(copies, gate.select(copies, rounded))


def set_noop_(noop_flag: Tensor, found: Tensor) -> None:
    """Sets the flag to 1 if ``found`` (0-d) is non-zero, on the device."""
    found = (found != 0).to(noop_flag.dtype).reshape(noop_flag.shape)
    torch.maximum(noop_flag, found, out=noop_flag)


def _check_flag(name: str, noop_flag: object) -> None:
    if not isinstance(noop_flag, Tensor):
        raise TypeError(
            f"{name} got a {type(noop_flag).__name__} as its overflow flag; it takes a tensor: "
            "torch.zeros(1, dtype=torch.int32, device=...)."
        )
    if noop_flag.numel() != 1:
        raise ValueError(
            f"{name} got an overflow flag of {noop_flag.numel()} elements; it takes one: "
            "torch.zeros(1, dtype=torch.int32, device=...)."
        )


def _check_tensor(name: str, noop_flag: Tensor, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name} got a {type(tensor).__name__} in a tensor list. Omit parameters without a "
            "gradient from every list."
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} takes dense tensors; it got one of layout {tensor.layout}.")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} takes floating-point tensors; it got one of {tensor.dtype}.")
    if tensor.device != noop_flag.device:
        raise ValueError(
            f"{name} got a tensor on {tensor.device} and its overflow flag on "
            f"{noop_flag.device}. Call it once per device, with a flag on that device."
        )


def _fitted(name: str, position: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    first = position[0]
    if all(tensor.shape == first.shape for tensor in position):
        return position
    shapes = [tuple(tensor.shape) for tensor in position]
    if any(tensor.numel() != first.numel() for tensor in position):
        raise ValueError(
            f"{name} got tensors of shapes {shapes} in one position; they must have the same "
            "number of elements."
        )
    if not all(tensor.is_contiguous() for tensor in position):
        raise ValueError(
            f"{name} got tensors of shapes {shapes} in one position; tensors of different "
            "shapes must be contiguous."
        )
    return tuple(tensor.view(-1) for tensor in position)
