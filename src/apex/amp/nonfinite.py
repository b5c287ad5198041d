"""Finds the gradients that hold inf or NaN, for reports of skipped steps."""

from __future__ import annotations

from collections.abc import Iterable
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


def nonfinite_gradients(params: Iterable[tuple[str, Tensor]]) -> list[NonfiniteGradient]:
    """Returns the gradients of named parameters that hold inf or NaN. Waits for the device."""
    found = []
    for name, param in params:
        if param.grad is not None:
            grad = finite.summed_values(dtensor.local(param.grad))
            counts = torch.stack([torch.isinf(grad).sum(), torch.isnan(grad).sum()])
            inf, nan = counts.tolist()  # sync: a diagnosis of a skipped step
            if inf or nan:
                found.append(NonfiniteGradient(name, inf, nan, grad.numel()))
    return found


def summary(session: Session) -> str:
    """Returns a sentence that names the first nonfinite gradients. Waits for the device."""
    names = {id(p): name for model in session.models for name, p in model.named_parameters()}
    params = {}
    for binding in session.bindings:
        models = {id(pair.master): pair.model for pair in binding.pairs}
        for param in binding.params():
            own = models.get(id(param), param)
            params[names.get(id(own), "(a parameter of no initialized model)")] = param
    found = [*map(str, nonfinite_gradients(params.items()))]
    if not found:
        return "No gradient holds inf or NaN now: they were cleared, or another rank overflowed."
    more = f", and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return f"Nonfinite gradients: {', '.join(found[:MAX_NAMED])}{more}."
