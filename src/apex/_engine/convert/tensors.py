"""Dtype changes of parameters and buffers in place, undone where one of them fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from apex._core import dtypes


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
        _assign(tensor, value, new_grad)

    def all(self) -> None:
        """Puts back everything, the last first."""
        while self._before:
            _assign(*self._before.pop())


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


def exact_value(param: Tensor, candidates: Iterable[Tensor]) -> Tensor:
    """Returns the value of ``param`` in fp32, as exactly as it is known.

    That is the last candidate which rounds to the parameter's value, for each element by itself,
    and otherwise the element as it is. Reads no value on the host.

    Args:
        param: A low-precision tensor.
        candidates: Unrounded values of it, such as its master; those of another shape are left out.
    """
    value = param.detach()
    result = value.to(torch.float32)
    for candidate in candidates:
        if candidate.shape == value.shape:
            exact = candidate.detach().to(device=value.device, dtype=torch.float32)
            result = torch.where(exact.to(value.dtype) == value, exact, result)
    return result


def _assign(tensor: Tensor, data: Tensor, grad: Tensor | None) -> None:
    if tensor.is_leaf:
        tensor.grad = None  # a gradient of another dtype than its tensor is refused
    tensor.data = data
    if grad is not None:
        tensor.grad = grad
