"""Finds passes with non-finite gradients where the loss scale is static, without a host sync."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from apex._core import finite
from apex._core.foreach import norms
from apex._engine.readback import Readback
from apex._torch import dtensor
from apex._torch.dispatch_modes import suspend_modes


@dataclass(frozen=True)
class NonfinitePass:
    """A pass whose gradients hold inf or NaN.

    Attributes:
        index: Position among the observed passes, counted from 1.
        loss_id: Index of the loss.
        params: Ids of the stepped parameters whose gradients are not finite.
        of: Number of gradients.
    """

    index: int
    loss_id: int
    params: frozenset[int]
    of: int


class GradientWatch:
    """Sends the largest gradient of every parameter to the host after each pass."""

    def __init__(self) -> None:
        self._readback: Readback[tuple[int, int, list[int]]] = Readback()
        self._passes = 0

    @torch.no_grad()
    def send(self, loss_id: int, params: Iterable[Tensor]) -> None:
        """Starts to copy what tells whether the gradients of a pass are finite."""
        self._passes += 1
        own = {id(p): grad for p in params if (grad := p.grad) is not None}
        if not own:
            return
        with suspend_modes():
            grads = [finite.summed_values(dtensor.local(grad)) for grad in own.values()]
            largest = [_in_range(norm) for norm in norms.max_norms(grads)]
            source = self._passes, loss_id, list(own)
            self._readback.send(source, norms.stacked(largest, largest[0].device))

    def poll(self) -> NonfinitePass | None:
        """Returns the first pass that was not finite, of those that have arrived since."""
        for (index, loss_id, params), largest in self._readback.poll():
            found = zip(params, largest, strict=True)
            bad = frozenset(param for param, value in found if not math.isfinite(value))
            if bad:
                return NonfinitePass(index, loss_id, bad, len(params))
        return None


def _in_range(norm: Tensor) -> Tensor:
    # A large fp64 norm would become inf in fp32.
    return norm - norm if norm.dtype is torch.float64 else norm
