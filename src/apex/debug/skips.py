"""Reports the non-finite gradients that cause a skipped step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import nn

from apex._engine.optimizer.optimizer_class import binding_of
from apex._engine.session import Session
from apex.amp.nonfinite import (
    NonfiniteGradient,
    count_nonfinite,
    nonfinite_gradients,
    nonfinite_of,
)
from apex.debug.loops import inner, loop_of


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
    binding = binding_of(inner(optimizer))
    if binding is not None:
        session = require_session(optimizer, "why_skipped")
        return count_nonfinite(nonfinite_gradients(session, only=binding))
    loop = loop_of("why_skipped", [optimizer], models=model)
    names = loop.names()
    found = nonfinite_of(loop.params())
    return count_nonfinite((names[id(param)], values) for param, values in found)


def require_session(optimizer: Any, caller: str, *, plain: str = "") -> Session:
    """Returns the session of an optimizer, or of a wrapped one.

    Raises:
        RuntimeError: If amp has not prepared it; the message names ``caller``, and with ``plain``
            says what to do in a plain loop.
    """
    binding = binding_of(inner(optimizer))
    if binding is None or binding.owner is None:
        otherwise = f" In a loop without amp.initialize, {plain}." if plain else ""
        raise RuntimeError(
            f"amp.debug.{caller} got an optimizer that amp has not prepared. Pass it to "
            f"amp.initialize(model, optimizer) and use the one returned.{otherwise}"
        )
    return cast(Session, binding.owner)
