"""apex's ``applier``, which scripts call, or replace to cast batches of their own types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apex._core import dtypes, tree
from apex._pickle import rebuild

Applier = Callable[[Any, Callable[[Tensor], Tensor]], Any]


def applier(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Returns ``value`` with ``fn`` applied to every tensor in it, container types kept."""
    return tree.map_tensors(fn, value)


_own = applier


class AppliedCast:
    """The cast of inputs and outputs by an ``applier`` that a script put in this module."""

    def __init__(self, replaced: Applier) -> None:
        """Holds the script's function."""
        self._replaced = replaced

    def __call__(self, value: Any, dtype: torch.dtype) -> Any:
        """Returns ``value`` with its floating tensors in ``dtype``."""
        return self._replaced(value, lambda tensor: dtypes.cast(tensor, dtype))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles by its kind; see :mod:`apex._pickle`."""
        return rebuild, ("cast", self._replaced)


def replaced_cast() -> AppliedCast | None:
    """Returns the cast by a replaced ``applier``; ``None`` while it is our own.

    ``amp.initialize`` asks once: replace ``apex.amp._initialize.applier`` before it.
    """
    return None if applier is _own else AppliedCast(applier)
