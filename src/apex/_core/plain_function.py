"""apex's autograd functions on torch's operators, which carry gradients by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor
from torch.autograd import Function


class PlainFunction(Function):
    """An autograd function to scripts, which import it, derive from it or call ``apply``."""

    forward: ClassVar[Callable[..., Tensor]]

    @classmethod
    def apply(cls, *args: Any) -> Tensor:
        """Returns the result of ``forward``; takes the same arguments, except ``ctx``."""
        return cls.forward(None, *args)

    @staticmethod
    def backward(ctx: object, grad_output: Tensor) -> Any:
        """Raises RuntimeError: torch computes the gradients of what ``apply`` returns."""
        raise RuntimeError("No backward here: torch differentiates what apply returns.")
