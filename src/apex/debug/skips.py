"""Reports the non-finite gradients that cause a skipped step."""

from __future__ import annotations

from typing import Any, cast

from apex._engine.optimizer.optimizer_class import binding_of
from apex._engine.session import Session
from apex.amp.nonfinite import NonfiniteGradient, count_nonfinite, nonfinite_gradients
from apex.amp.optimizers import unwrap


def why_skipped(optimizer: Any) -> list[NonfiniteGradient]:
    """Returns the gradients that hold inf or NaN; empty if all are finite or cleared.

    Call it after the ``scale_loss`` block and before ``zero_grad``. It waits for the device. With
    ``verbosity=2``, ``amp.initialize`` prints the same list at every overflow.

    Args:
        optimizer: An optimizer prepared by ``amp.initialize``, at any level.

    Raises:
        RuntimeError: If amp has not prepared the optimizer.

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
    session, binding = require_session(optimizer, "why_skipped")
    return count_nonfinite(nonfinite_gradients(session, only=binding))


def require_session(optimizer: Any, caller: str) -> tuple[Session, Any]:
    """Returns an optimizer's session and binding.

    Args:
        optimizer: An optimizer, or LARC around one.
        caller: Name of the calling public function, for the error message.

    Raises:
        RuntimeError: If amp has not prepared the optimizer.
    """
    binding = binding_of(unwrap(optimizer))
    if binding is None or binding.owner is None:
        raise RuntimeError(
            f"amp.debug.{caller} got an optimizer that amp has not prepared. Pass it to "
            "amp.initialize(model, optimizer) and use the one returned."
        )
    return cast(Session, binding.owner), binding
