"""How far a value is from its shadow, by norm."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_MASK = -1000.0
"""Values below this may be those of a mask."""


_DECIDED = 0.9
"""Probability from which a row of a softmax counts as decided."""


class Distance(NamedTuple):
    """Two norms.

    Attributes:
        difference: Norm of the difference from the shadow.
        size: Norm of the shadow.
    """

    difference: float
    size: float

    @property
    def relative(self) -> float:
        """The difference relative to the shadow."""
        return self.difference / self.size if self.size else math.inf if self.difference else 0.0


def distance(values: Tensor, shadow: Tensor) -> Distance:
    """Returns the distance of a value from its shadow, masked elements left out.

    Masked are elements that are infinite or NaN on either side and, where a mask was added, those
    far below all others: their size would hide the error of the rest.
    """
    if values.is_complex():
        values, shadow = torch.view_as_real(values), torch.view_as_real(shadow)
    if not values.numel():
        return Distance(0.0, 0.0)
    wide, shadow = values.double(), shadow.double()
    known = torch.isfinite(wide) & torch.isfinite(shadow)
    shadow = torch.where(known, shadow, 0.0)
    difference = torch.where(known, wide, 0.0) - shadow
    least = float(shadow.amin())  # sync: tracing is a diagnosis, here and below
    if least < _MASK:
        masked = shadow < least / 2
        rest = torch.where(masked, 0.0, shadow)
        if 50.0 * float(rest.abs().amax()) < -least and not bool(masked.all()):
            shadow, difference = rest, torch.where(masked, 0.0, difference)
    norms = torch.stack([torch.linalg.vector_norm(each) for each in (difference, shadow)])
    return Distance(*norms.tolist())


def distance_of_probabilities(
    values: Tensor, shadow: Tensor, dim: int, *, is_log: bool
) -> Distance:
    """Returns the distance of a softmax from its shadow, over the rows that are not yet decided.

    Rows in which one probability is almost 1 are exact whatever the logits' errors are, and would
    hide those of the others.
    """
    values, shadow = values.double(), shadow.double()
    if is_log:
        values, shadow = values.exp(), shadow.exp()
    open_rows = shadow.amax(dim, keepdim=True) < _DECIDED if shadow.dim() else shadow < _DECIDED
    return distance(torch.where(open_rows, values, 0.0), torch.where(open_rows, shadow, 0.0))
