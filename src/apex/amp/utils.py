"""The names of apex's module of helpers for casts that scripts import."""

from typing import Any

from torch import Tensor

from apex import _unavailable

__getattr__ = _unavailable.names_instead(
    __name__, {}, others="amp.half_function, amp.float_function or torch's own functions"
)


def is_fp_tensor(x: Any) -> bool:
    """Returns whether ``x`` is a floating-point tensor, or a tuple or list of only such."""
    if isinstance(x, tuple | list):
        return all(map(is_fp_tensor, x))
    return isinstance(x, Tensor) and x.is_floating_point()
