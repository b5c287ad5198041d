"""apex's ``applier`` and ``to_type``, which scripts call, or replace to cast custom batch types."""

from __future__ import annotations

import functools
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

Applier = Callable[[Any, Callable[[Any], Any]], Any]
ToType = Callable[[torch.dtype, Any], Any]


def applier(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Returns ``value`` with ``fn`` applied to every tensor and every object with a ``to`` method.

    Keeps container types.
    """
    return tree.map_tensors(fn, value, fn)


def to_type(dtype: torch.dtype, t: Any) -> Any:
    """Casts floating-point tensors, and other objects through their ``to``; keeps other tensors."""
    return dtypes.cast(t, dtype) if isinstance(t, Tensor) else tree.converted(t, dtype)


_DEFAULT: tuple[Applier, ToType] = applier, to_type


class AppliedCast:
    """Casts inputs and outputs through what a script assigned to this module.

    Keeps only the script's own functions, so that saved files name none of this module.
    """

    def __init__(self, own_applier: Applier | None, own_to_type: ToType | None = None) -> None:
        self._own = own_applier, own_to_type

    def __call__(self, value: Any, dtype: torch.dtype) -> Any:
        """Returns ``value`` with its floating-point tensors in ``dtype``."""
        apply, cast = (own or default for own, default in zip(self._own, _DEFAULT, strict=True))
        return apply(value, functools.partial(cast, dtype))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles by kind; see :mod:`apex._pickle`."""
        return rebuild, ("cast", *self._own)


def custom_cast() -> AppliedCast | None:
    """Returns a cast through a script's ``applier`` or ``to_type``; ``None`` for the default ones.

    ``amp.initialize`` calls this once, so replace them in ``apex.amp._initialize`` before that.
    """
    present = zip((applier, to_type), _DEFAULT, strict=True)
    own = [fn if fn is not default else None for fn, default in present]
    return AppliedCast(*own) if any(own) else None
