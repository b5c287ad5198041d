"""Why a step is skipped: the gradients that are not finite."""

from __future__ import annotations

from typing import Any, cast

from apex._engine.optimizer.optimizer_class import binding_of
from apex._engine.session import Session
from apex.amp.nonfinite import NonfiniteGradient, found_in, nonfinite_gradients
from apex.amp.optimizers import unwrap


def why_skipped(optimizer: Any) -> list[NonfiniteGradient]:
    """Returns the gradients that hold inf or NaN now; empty if all are finite or cleared.

    Ask after the ``scale_loss`` block and before ``zero_grad``. Waits for the device; nothing is
    computed before somebody asks. ``verbosity=2`` of ``amp.initialize`` prints it at each overflow.

    Args:
        optimizer: One that ``amp.initialize`` prepared, at any level.

    Raises:
        RuntimeError: For an optimizer that is not prepared.

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
    session, binding = prepared(optimizer, "why_skipped")
    return found_in(nonfinite_gradients(session, only=binding))


def prepared(optimizer: Any, caller: str) -> tuple[Session, Any]:
    """Returns the session and the binding of an optimizer.

    Args:
        optimizer: An optimizer or LARC around one.
        caller: Name of the public function, for the message.

    Raises:
        RuntimeError: If it has none.
    """
    binding = binding_of(unwrap(optimizer))
    if binding is None or binding.owner is None:
        raise RuntimeError(
            f"amp.debug.{caller} got an optimizer that amp has not prepared. Pass it to "
            "amp.initialize(model, optimizer) and use the one returned."
        )
    return cast(Session, binding.owner), binding
