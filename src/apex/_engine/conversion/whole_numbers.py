"""Finds whole numbers in arguments, such as codes or time steps, that 16 bits do not hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from apex._core import tree
from apex._core.dtypes import is_low_precision
from apex._engine.conversion.plan import WIDE
from apex._engine.scaler import Readback

_is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]

_LARGEST = 2.0**23
"""From here on, every fp32 value is a whole number."""


class WholeNumbers:
    """The search in the arguments of one model's first forward passes, without a wait.

    Arguments on the host are searched in each pass, one on a device once: what is found there
    arrives in a later pass.
    """

    def __init__(self) -> None:
        self._searched: set[str] = set()
        self._readback: Readback[str] = Readback()

    def search(self, name: str, argument: object, cast: object) -> None:
        """Looks for whole numbers in an argument that its cast changes."""
        for exact, rounded in zip(tree.tensors(argument), tree.tensors(cast), strict=False):
            is_rounded = exact.dtype in WIDE and is_low_precision(rounded)
            if is_rounded and self._may_search(name, exact):
                with contextlib.suppress(RuntimeError):  # torch.func's tensors have no values
                    self._readback.send(name, _lost(exact, rounded.dtype))

    def found(self) -> Iterator[tuple[str, float]]:
        """Yields names of arguments and a whole number, as far as they have arrived."""
        for name, (number,) in self._readback.poll():
            if number != 0.0:
                yield name, number

    def _may_search(self, name: str, tensor: Tensor) -> bool:
        if _is_tracing() or tensor.layout is not torch.strided or tensor.numel() == 0:
            return False
        if tensor.device.type == "cpu":
            return True
        is_new = name not in self._searched
        self._searched.add(name)
        return is_new


@torch.no_grad()
def _lost(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a whole number that a dtype does not hold, from a column of such, or 0.0, as [1].

    A column is what the last dimension indexes; one row is no column. Measured values are rounded
    as well, and seldom whole: so at least half of what a column loses must be whole numbers.
    """
    columns = exact.reshape(-1, exact.shape[-1]) if exact.dim() > 1 else exact.reshape(-1, 1)
    if columns.shape[0] == 1:
        columns = columns.reshape(-1, 1)
    changed = (columns.to(dtype).to(columns.dtype) != columns) & (columns.abs() < _LARGEST)
    whole = changed & (columns == columns.round())
    are_codes = whole.any(0) & (2 * whole.sum(0) >= changed.sum(0))
    codes = whole & are_codes
    example = torch.where(codes, columns, 0.0).flatten()
    largest = example.abs().argmax(0, keepdim=True)
    return example[largest]
