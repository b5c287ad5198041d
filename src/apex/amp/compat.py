"""apex's compatibility checks for early torch releases, answered for current ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def variable_is_tensor() -> bool:
    """Returns True: ``Variable`` and ``Tensor`` were merged in torch 0.4."""
    return True


def tensor_is_variable() -> bool:
    """Returns True: ``Variable`` and ``Tensor`` were merged in torch 0.4."""
    return True


def tensor_is_float_tensor() -> bool:
    """Returns False: since torch 0.4, ``torch.Tensor`` covers every dtype."""
    return False


def is_tensor_like(x: object) -> bool:
    """Returns whether ``x`` is a tensor."""
    return isinstance(x, Tensor)


def is_floating_point(x: object) -> bool:
    """Returns whether ``x`` is a floating-point tensor."""
    return isinstance(x, Tensor) and x.is_floating_point()


def scalar_python_val(x: Any) -> Any:
    """Returns a 0-d tensor as a number, anything else unchanged. Waits for the device."""
    return x.tolist() if isinstance(x, Tensor) and x.dim() == 0 else x


def filter_attrs(module: object, attrs: Iterable[str]) -> list[str]:
    """Returns the names in ``attrs`` that ``module`` has."""
    names = set(dir(module))
    return [name for name in attrs if name in names]
