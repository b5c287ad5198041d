"""Names the gradients that hold inf or NaN, for reports of skipped steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from apex._core import finite
from apex._engine.optimizer.binding import Binding
from apex._engine.session import Session
from apex._torch import dtensor

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


def nonfinite_gradients(
    session: Session, only: Binding | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields name and gradient of every parameter whose gradient holds inf or NaN.

    Waits for the device: for a diagnosis, never in a normal step.

    Args:
        session: Whose models and optimizers to look at.
        only: The optimizer whose parameters to look at; ``None`` for all.
    """
    names = {id(p): name for model in session.models for name, p in model.named_parameters()}
    for binding in session.bindings if only is None else (only,):
        models = {id(pair.master): pair.model for pair in binding.pairs}
        for param in binding.params():
            if param.grad is None:
                continue
            values = finite.summed_values(dtensor.local(param.grad))
            if not bool(torch.isfinite(values).all()):  # sync: a diagnosis after 50 skips
                own = models.get(id(param), param)
                yield names.get(id(own), "(a parameter of no initialized model)"), values


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
