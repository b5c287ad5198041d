"""apex's ``applier``, which scripts call, or replace to cast batches of their own types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apex import _unavailable
from apex._core import dtypes, tree
from apex._pickle import rebuild

_CHECKS = "amp.initialize, which checks all that it is given before it changes anything"

__getattr__ = _unavailable.names_instead(
    __name__,
    {
        "O2StateDictHook": "model.state_dict(), which is fp32 at every level",
        "_initialize": "amp.initialize",
        "check_models": _CHECKS,
        "check_optimizers": _CHECKS,
        "check_params_fp32": _CHECKS,
    },
)

Applier = Callable[[Any, Callable[[Tensor], Tensor]], Any]


def applier(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Returns ``value`` with ``fn`` applied to every tensor in it, container types kept."""
    return tree.map_tensors(fn, value)


def to_type(dtype: torch.dtype, t: Any) -> Any:
    """Returns a floating tensor in ``dtype``, other tensors as they are, other values by ``to``."""
    return dtypes.cast(t, dtype) if isinstance(t, Tensor) else t.to(dtype)


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
