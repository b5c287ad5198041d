"""apex's ``applier``, which scripts call or replace to cast their own batches, and ``to_type``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from apex import _unavailable
from apex._core import tree

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


def applier(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Returns ``value`` with ``fn`` applied to every tensor and every object with a ``to`` method.

    Keeps container types.
    """
    return tree.map_leaves(fn, value)


def to_type(dtype: torch.dtype, t: Any) -> Any:
    """Casts floating-point tensors, and other objects through their ``to``; keeps other tensors."""
    return tree.cast(t, dtype)


_applier = applier


def custom_cast() -> Callable[[Any, torch.dtype], Any] | None:
    """Returns a cast through a script's ``applier``; ``None`` for the default one.

    ``amp.initialize`` calls this once, so replace it in ``apex.amp._initialize`` before that.
    """
    own_applier = applier
    if own_applier is _applier:
        return None
    return lambda value, dtype: own_applier(value, functools.partial(to_type, dtype))
