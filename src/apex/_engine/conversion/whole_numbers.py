"""Finds whole numbers in arguments, such as codes or time steps, that 16 bits do not hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from apex._core import tree
from apex._core.dtypes import is_low_precision
from apex._engine.conversion.plan import WIDE

_is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]

_LARGEST = 2.0**23
"""From here on, every fp32 value is a whole number."""


class WholeNumbers:
    """The search in the arguments of one model's first forward passes.

    Arguments on the host are searched in each pass. One on a device is searched once, as the answer
    is read back.
    """

    def __init__(self) -> None:
        self._searched: set[str] = set()

    def lost_in(self, name: str, argument: object, cast: object) -> float | None:
        """Returns a whole number in an argument that its cast changes; None without one."""
        for exact, rounded in zip(tree.tensors(argument), tree.tensors(cast), strict=False):
            if exact.dtype not in WIDE or not is_low_precision(rounded):
                continue
            if self._may_read(name, exact):
                with contextlib.suppress(RuntimeError):  # torch.func's tensors have no values
                    lost = _lost(exact, rounded.dtype)
                    if lost:
                        return lost
        return None

    def _may_read(self, name: str, tensor: Tensor) -> bool:
        if _is_tracing() or tensor.layout is not torch.strided or tensor.numel() == 0:
            return False
        if tensor.device.type == "cpu":
            return True
        if name in self._searched or tensor.is_meta:
            return False
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        self._searched.add(name)
        return True


@torch.no_grad()
def _lost(exact: Tensor, dtype: torch.dtype) -> float:
    """Returns a whole number that a dtype does not hold, from a column of such; 0.0 without one.

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
    (number,) = example[largest].tolist()  # sync: on a device, once per argument
    return float(number)
