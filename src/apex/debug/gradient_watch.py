"""Finds passes with non-finite gradients where the loss scale is static, without a host sync."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from apex._core import finite
from apex._core.foreach import norms
from apex._engine.events import PassEnd
from apex._engine.optimizer.binding import Binding
from apex._engine.readback import Readback
from apex._engine.session import Session
from apex._torch import dtensor


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
        """Starts without passes."""
        self._readback = Readback()
        self._sent: deque[tuple[int, int, list[int]]] = deque()
        self._passes = 0

    @torch.no_grad()
    def send(self, end: PassEnd) -> None:
        """Starts to copy what tells whether the gradients of a pass are finite."""
        self._passes += 1
        bindings = [binding for binding in end.bindings if isinstance(binding, Binding)]
        params = {id(p): p for b in bindings for p in b.params() if p.grad is not None}
        grads = [finite.summed_values(dtensor.local(p.grad)) for p in params.values()]  # type: ignore[arg-type]
        if not grads:
            return
        largest = [_in_range(norm) for norm in norms.max_norms(grads)]
        if self._readback.send(norms.stacked(largest, largest[0].device)):
            self._sent.append((self._passes, end.loss_id, list(params)))

    def poll(self) -> list[NonfinitePass]:
        """Returns the passes that were not finite, of those that have arrived since."""
        found = []
        for largest in self._readback.poll():
            index, loss_id, params = self._sent.popleft()
            bad = frozenset(
                param
                for param, value in zip(params, largest, strict=True)
                if not abs(value) < float("inf")
            )
            if bad:
                found.append(NonfinitePass(index, loss_id, bad, len(params)))
        return found


def names_of(session: Session, params: frozenset[int]) -> list[str]:
    """Returns the names of the models' parameters that are stepped as ``params`` (ids)."""
    models = {id(p): name for model in session.models for name, p in model.named_parameters()}
    own = {id(p.model): id(p.master) for binding in session.bindings for p in binding.pairs}
    return [name for key, name in models.items() if own.get(key, key) in params]


def weights_are_finite(session: Session) -> bool:
    """Returns whether every weight is finite. Waits for the device."""
    weights: Sequence[Tensor] = [p for binding in session.bindings for p in binding.params()]
    return all(
        bool(torch.isfinite(dtensor.local(weight)).all())  # sync: a diagnosis
        for weight in weights
    )


def _in_range(norm: Tensor) -> Tensor:
    # A large fp64 norm would become inf in fp32.
    return norm - norm if norm.dtype is torch.float64 else norm
