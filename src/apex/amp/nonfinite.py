"""Finds the gradients that hold inf or NaN, for reports of skipped steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from apex._core import finite
from apex._engine.session import Session
from apex._torch import dtensor

MAX_NAMED = 3


@dataclass(frozen=True)
class NonfiniteGradient:
    """One parameter whose gradient holds inf or NaN.

    Attributes:
        name: Qualified name of the parameter in its model.
        inf: Number of infinite elements, of either sign.
        nan: Number of NaN elements.
        elements: Number of elements.
    """

    name: str
    inf: int
    nan: int
    elements: int

    def __str__(self) -> str:
        counts = [f"{n} {kind}" for n, kind in ((self.inf, "inf"), (self.nan, "nan")) if n]
        return f"{self.name} ({', '.join(counts)} of {self.elements})"


def nonfinite_gradients(session: Session) -> Iterator[tuple[str, Tensor]]:
    """Yields the name and gradient of every parameter whose gradient holds inf or NaN.

    Waits for the device, so call it for diagnosis only.
    """
    names = {id(p): name for model in session.models for name, p in model.named_parameters()}
    for binding in session.bindings:
        models = {id(pair.master): pair.model for pair in binding.pairs}
        for param, values in nonfinite_of(binding.params()):
            own = models.get(id(param), param)
            yield names.get(id(own), "(a parameter of no initialized model)"), values


def nonfinite_of(params: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the parameters whose gradient holds inf or NaN, with its values. Syncs."""
    for param in params:
        if param.grad is not None:
            values = finite.summed_values(dtensor.local(param.grad))
            if not bool(torch.isfinite(values).all()):  # sync: a diagnosis of skipped steps
                yield param, values


def count_nonfinite(gradients: Iterable[tuple[str, Tensor]]) -> list[NonfiniteGradient]:
    """Counts inf and NaN in named gradients. Waits for the device."""
    counted = []
    for name, grad in gradients:
        counts = torch.stack([torch.isinf(grad).sum(), torch.isnan(grad).sum()])
        inf, nan = counts.tolist()  # sync: a diagnosis of a skipped step
        counted.append(NonfiniteGradient(name, inf, nan, grad.numel()))
    return counted


def summary(gradients: list[NonfiniteGradient]) -> str:
    """Returns one line on the nonfinite gradients, which names the first few."""
    if not gradients:
        return "No gradient holds inf or NaN now: they were cleared, or another rank overflowed."
    more = len(gradients) - MAX_NAMED
    named = ", ".join(map(str, gradients[:MAX_NAMED])) + (f", and {more} more" if more > 0 else "")
    return f"Nonfinite gradients: {named}."
