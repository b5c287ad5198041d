"""Questions about torch's own history, answered for today's torch, under apex's names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def variable_is_tensor() -> bool:
    """Returns True: Variable and Tensor are one since torch 0.4."""
    return True


def tensor_is_variable() -> bool:
    """Returns True: Variable and Tensor are one since torch 0.4."""
    return True


def tensor_is_float_tensor() -> bool:
    """Returns False: ``torch.Tensor`` has not meant fp32 tensors since torch 0.4."""
    return False


def is_tensor_like(x: object) -> bool:
    """Returns whether ``x`` is a tensor."""
    return isinstance(x, Tensor)


def is_floating_point(x: object) -> bool:
    """Returns whether ``x`` is a floating tensor; False for anything that is no tensor."""
    return isinstance(x, Tensor) and x.is_floating_point()


def scalar_python_val(x: Any) -> Any:
    """Returns a one-element tensor as a number, anything else as it is. Waits for the device."""
    return x.tolist() if isinstance(x, Tensor) and x.dim() == 0 else x


def filter_attrs(module: object, attrs: Iterable[str]) -> list[str]:
    """Returns those of the names ``attrs`` that ``module`` has."""
    names = set(dir(module))
    return [name for name in attrs if name in names]
