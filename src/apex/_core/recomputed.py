"""The backward of an autograd function whose forward autograd can differentiate by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def gradients(
    forward: Callable[..., Tensor], args: Sequence[Tensor], grad_output: Tensor
) -> list[Tensor | None]:
    """Runs ``forward`` again and returns the gradients of its arguments, None where none is needed.

    They have derivatives of their own in a pass with ``create_graph=True``.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        output = forward(*args)
        needed = [arg for arg in args if arg.requires_grad]
        grad = grad_output.to(output.dtype)
        found = iter(torch.autograd.grad(output, needed, grad, create_graph=again))
    return [next(found) if arg.requires_grad else None for arg in args]
