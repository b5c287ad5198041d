"""Why a step is skipped: the gradients that are not finite."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from apex._engine.optimizer_class import binding_of
from apex._engine.session import Session
from apex.amp.optimizers import unwrap

NAMED = 3


@dataclass(frozen=True)
class NonfiniteGradient:
    """One parameter whose gradient holds inf or NaN.

    Attributes:
        name: Qualified name of the parameter in its model.
        inf: Elements that are infinite, of either sign.
        nan: Elements that are NaN.
        elements: Elements of the gradient.
    """

    name: str
    inf: int
    nan: int
    elements: int

    def __str__(self) -> str:
        """Returns name and counts."""
        counts = [f"{n} {kind}" for n, kind in ((self.inf, "inf"), (self.nan, "nan")) if n]
        return f"{self.name} ({', '.join(counts)} of {self.elements})"


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
    return found_in(session.nonfinite_gradients(only=binding))


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


def found_in(gradients: Iterable[tuple[str, Tensor]]) -> list[NonfiniteGradient]:
    """Counts what is not finite in named gradients. Waits for the device."""
    found = []
    for name, grad in gradients:
        counts = torch.stack([torch.isinf(grad).sum(), torch.isnan(grad).sum()])
        inf, nan = counts.tolist()  # sync: a diagnosis of a skipped step
        found.append(NonfiniteGradient(name, inf, nan, grad.numel()))
    return found


def sentence(gradients: list[NonfiniteGradient]) -> str:
    """Says in a line which gradients were not finite: the first few by name."""
    if not gradients:
        return "No gradient is inf or NaN any more: they were cleared, or another rank overflowed."
    more = len(gradients) - NAMED
    named = ", ".join(map(str, gradients[:NAMED])) + (f", and {more} more" if more > 0 else "")
    return f"Gradients not finite: {named}."
