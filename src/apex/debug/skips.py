"""Reports the non-finite gradients that cause a skipped step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from apex.amp.nonfinite import NonfiniteGradient, nonfinite_gradients
from apex.debug.loops import loop_of


def why_skipped(
    optimizer: Any, *, model: nn.Module | Sequence[nn.Module] | None = None
) -> list[NonfiniteGradient]:
    """Returns the gradients that hold inf or NaN; empty if all are finite or cleared.

    Call it after the ``scale_loss`` block and before ``zero_grad``. It waits for the device. With
    ``verbosity=2``, ``amp.initialize`` prints the same list at every overflow.

    Args:
        optimizer: An optimizer prepared by ``amp.initialize``, at any level, or that of a plain
            loop: call it after ``backward`` or, with a ``GradScaler``, after ``scaler.step``.
        model: The model or models of a plain loop, for names.

    Raises:
        RuntimeError: If the amp session of an optimizer from a file is gone.

    Example:
        >>> import torch
        >>> from apex import amp
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        >>> loss = (model.weight * torch.tensor([[1.0, torch.inf]])).sum()
        >>> with amp.scale_loss(loss, optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> for gradient in amp.debug.why_skipped(optimizer):
        ...     print(gradient)
        weight (1 inf of 2)
    """
    loop = loop_of("why_skipped", [optimizer], models=model)
    names = loop.names()
    return nonfinite_gradients((names[id(param)], param) for param in loop.params())
