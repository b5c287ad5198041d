"""Follows non-finite values from the operator that produced them first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from apex.debug.faults import Fault
from apex.debug.module_tracker import Site
from apex.debug.tensors import covers_storage, storage_key

_FP16 = torch.float16


@dataclass(frozen=True)
class Origin:
    """The operator that first produced a non-finite value.

    Attributes:
        fault: The operator and its cause.
        time: Number of operators traced before it.
        deliberate: Whether the value is intended, as a constant or a mask.
    """

    fault: Fault
    time: int
    deliberate: bool


class Provenance:
    """The origins of all live non-finite values, by the memory that holds them.

    Note [When an origin is a fault]
        Infinities can be deliberate (masks), and NaNs can be produced and masked out again: torch's
        own formula for the derivative of a norm divides 0 by 0 and replaces the result. So an
        origin counts as a fault only once its values reach a gradient, the loss or a weight. If a
        backward pass completes with finite gradients, all earlier origins were harmless, with one
        exception: a value beyond fp16's range is lost even if a later function (a clamp, a
        sigmoid) maps the infinity to a finite value. Where several origins meet, those whose
        values were masked out come last.
    """

    def __init__(self) -> None:
        """Starts without origins."""
        self.time = 0
        self.origins: list[Origin] = []
        self.reached: list[Origin] = []
        self._finite_gradient_at = -1
        self._masked_out: set[int] = set()
        self._by_memory: dict[int, Origin] = {}
        self._by_node: dict[int, tuple[Site, Origin]] = {}

    # -- values ----------------------------------------------------------------------------------

    def of(self, tensor: Tensor) -> Origin | None:
        """Returns the origin of a tensor's non-finite values; None if they came from outside."""
        return self._by_memory.get(storage_key(tensor))

    def mark(self, tensor: Tensor, origin: Origin) -> None:
        """Records ``origin`` for the non-finite values of a tensor."""
        self._by_memory[storage_key(tensor)] = origin

    def clear(self, tensor: Tensor) -> None:
        """Records that a tensor was written and is finite."""
        if self._by_memory and covers_storage(tensor):
            self._by_memory.pop(storage_key(tensor), None)

    def close(self) -> None:
        """Releases everything except the origins, once tracing has ended."""
        self._by_memory.clear()
        self._by_node.clear()

    def add_origin(self, fault: Fault, *, deliberate: bool = False) -> Origin:
        """Returns a new origin at the current operator."""
        origin = Origin(fault, self.time, deliberate)
        self.origins.append(origin)
        return origin

    def mark_masked(self, origin: Origin) -> None:
        """Records that values of ``origin`` were masked out."""
        self._masked_out.add(origin.time)

    def most_severe(self, origins: Iterable[Origin]) -> Origin | None:
        """Returns the most severe origin; among equals, the first."""
        return min(origins, key=self._severity, default=None)

    def _severity(self, origin: Origin) -> tuple[bool, bool, bool, int]:
        stale = origin.fault.cause == "gradients"  # left by an earlier step
        return origin.deliberate, stale, origin.time in self._masked_out, origin.time

    # -- autograd nodes --------------------------------------------------------------------------

    def link_site(self, site: Site, origin: Origin) -> None:
        """Records that the forward operator at ``site`` produced ``origin``."""
        self._by_node[id(site)] = site, origin  # holding the site keeps its id unique

    def of_site(self, site: Site | None) -> Origin | None:
        """Returns the origin that a node's forward produced: its derivative is infinite too."""
        return self._by_node.get(id(site), (None, None))[1]

    # -- faults ----------------------------------------------------------------------------------

    def mark_reached(self, origin: Origin) -> None:
        """Records that values of ``origin`` reached a gradient, the loss or a weight."""
        self.reached.append(origin)

    def mark_finite_gradient(self) -> None:
        """Records that a parameter received a finite gradient."""
        self._finite_gradient_at = self.time

    def first(self) -> Fault | None:
        """Returns the first fault; see Note [When an origin is a fault]."""
        faults = [origin for origin in self.origins if not origin.deliberate]
        lost = [o for o in faults if o.fault.cause == "range" and o.fault.dtype is _FP16]
        pending = [o for o in faults if o.time > self._finite_gradient_at]
        for origins in ([*self.reached, *lost], pending):
            origin = self.most_severe(origins)
            if origin is not None:
                return origin.fault
        return None
