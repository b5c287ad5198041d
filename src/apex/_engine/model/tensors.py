"""Dtype changes of parameters and buffers in place, undone where one of them fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from apex._core import dtypes
from apex._torch import dtensor


class Undo:
    """What tensors held before they were cast."""

    def __init__(self) -> None:
        """Starts with nothing to undo."""
        self._before: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> None:
        """Casts ``tensor`` and its gradient; the object stays, so all who share it see it."""
        if tensor.dtype is dtype or not dtypes.is_castable(tensor):
            return
        self.set(tensor, tensor.detach().to(dtype))

    def set(self, tensor: Tensor, value: Tensor) -> None:
        """Gives ``tensor`` the storage and dtype of ``value``, its gradient the same dtype."""
        grad = tensor.grad if tensor.is_leaf else None
        new_grad = None if grad is None else dtypes.cast(grad.detach(), value.dtype)
        self._before.append((tensor, tensor.data, grad))
        assign(tensor, value, new_grad)

    def all(self) -> None:
        """Puts back everything, the last first."""
        while self._before:
            assign(*self._before.pop())


@contextmanager
def all_or_nothing() -> Iterator[Undo]:
    """Undoes every cast made inside where an exception leaves the block.

    The old values are held until the block ends: for its time the model takes both.
    """
    undo = Undo()
    try:
        yield undo
    except BaseException:
        undo.all()
        raise


def assign(tensor: Tensor, data: Tensor, grad: Tensor | None) -> None:
    """Gives ``tensor`` the storage and dtype of ``data`` and the gradient ``grad``."""
    if tensor.is_leaf:
        tensor.grad = None  # a gradient of another dtype than its tensor is refused
    if not dtensor.is_dtensor(tensor):
        tensor.data = data
    elif tensor.dtype is not data.dtype:
        _swap(tensor, data)
    if grad is not None:
        tensor.grad = grad


def _swap(tensor: Tensor, data: Tensor) -> None:
    """Does what setting ``tensor.data`` does for plain tensors; a DTensor keeps its local part."""
    other = data.detach().requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, requires_grad=tensor.requires_grad)
    attributes = dict(tensor.__dict__)
    torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
    tensor.__dict__.update(attributes)
