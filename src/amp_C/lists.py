"""Checks the tensor lists that multi-tensor functions receive, and sets their overflow flag."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

TensorLists = Sequence[Sequence[Tensor]]
Function = TypeVar("Function", bound=Callable[..., Any])


def takes(*counts: int, empty: bool = False) -> Callable[[Function], Function]:
    """Returns a decorator for functions that receive tensor lists and record no graph.

    Args:
        *counts: The accepted numbers of lists.
        empty: Whether to call the function for empty lists, instead of doing nothing.

    A call with lists that do not fit raises before anything changes. Tensors in one position that
    differ in shape, but not in their number of elements, become flat views.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        @torch.no_grad()
        def call(
            chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, *args: Any, **kwargs: Any
        ) -> Any:
            _check(function.__name__, noop_flag, tensor_lists, counts)
            positions = zip(*tensor_lists)  # noqa: B905 - _check compares the lengths
            fitted = [_fitted(function.__name__, position) for position in positions]
            lists = tensor_lists
            if fitted:
                lists = list(zip(*fitted))  # noqa: B905
            elif not empty:
                return None
            return function(chunk_size, noop_flag, lists, *args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def set_noop_(noop_flag: Tensor, overflow: Tensor) -> None:
    """Sets the flag to 1 if ``overflow`` (0-d) is non-zero, on the device."""
    noop_flag.masked_fill_((overflow != 0).reshape(noop_flag.shape), 1)


def _check(
    name: str, noop_flag: Tensor, lists: Sequence[Sequence[Any]], counts: tuple[int, ...]
) -> None:
    """Raises unless the lists are of an accepted number, of one length, and of dense tensors."""
    lengths = [len(tensors) for tensors in lists]
    if len(lists) not in counts or len({*lengths}) > 1:
        raise ValueError(
            f"{name} got lists of {lengths} tensors; it takes {' or '.join(map(str, counts))} "
            "lists of one length, with one position for each parameter."
        )
    for tensor in chain(*lists):
        got: object = type(tensor)
        if isinstance(tensor, Tensor):
            fits = tensor.layout is torch.strided and tensor.is_floating_point()
            if fits and tensor.device == noop_flag.device:
                continue
            got = f"{tensor.layout} {tensor.dtype} on {tensor.device}"
        raise TypeError(
            f"{name} got {got}; it takes dense floating-point tensors on the device of the "
            f"overflow flag, {noop_flag.device}. Omit parameters without a gradient from every "
            "list."
        )


def _fitted(name: str, position: tuple[Tensor, ...]) -> Sequence[Tensor]:
    """Returns the tensors in one position of all lists, with one shape."""
    if len({tensor.shape for tensor in position}) == 1:
        return position
    if len({tensor.numel() for tensor in position}) > 1:
        raise ValueError(
            f"{name} got tensors of shapes {[tuple(tensor.shape) for tensor in position]} in one "
            "position; they must have the same number of elements."
        )
    return [tensor.view(-1) for tensor in position]
