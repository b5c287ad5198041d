"""apex's ``applier``, which scripts call, or replace to cast custom batch types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apex import _unavailable
from apex._core import dtypes, tree
from apex._pickle import rebuild

_CHECKS = "amp.initialize, which validates its arguments before it changes anything"

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
    """Returns ``value`` with ``fn`` applied to every tensor; keeps container types."""
    return tree.map_tensors(fn, value)


def to_type(dtype: torch.dtype, t: Any) -> Any:
    """Casts floating-point tensors, and other objects through their ``to``; keeps other tensors."""
    return dtypes.cast(t, dtype) if isinstance(t, Tensor) else t.to(dtype)


_default_applier = applier


class AppliedCast:
    """Casts inputs and outputs through an ``applier`` that a script assigned to this module."""

    def __init__(self, custom_applier: Applier) -> None:
        self._applier = custom_applier

    def __call__(self, value: Any, dtype: torch.dtype) -> Any:
        """Returns ``value`` with its floating-point tensors in ``dtype``."""
        return self._applier(value, lambda tensor: dtypes.cast(tensor, dtype))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles by kind; see :mod:`apex._pickle`."""
        return rebuild, ("cast", self._applier)


def custom_cast() -> AppliedCast | None:
    """Returns a cast through a script's ``applier``; ``None`` for the default one.

    ``amp.initialize`` calls this once, so replace ``apex.amp._initialize.applier`` before that.
    """
    return None if applier is _default_applier else AppliedCast(applier)
