"""Where non-finite values come from: each one followed from the operator that began it."""

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
    """Where non-finite values began.

    Attributes:
        fault: The operator.
        time: Operators seen before it.
        deliberate: Whether it was put there on purpose: a constant, a mask.
    """

    fault: Fault
    time: int
    deliberate: bool


class Lineage:
    """The origins of all non-finite values that are alive, by the memory that holds them.

    Note [When an origin is a fault]
        Infinities are made on purpose (masks), and NaNs are made and masked away again: torch's own
        formula for the derivative of a norm divides 0 by 0 and replaces the result. So an origin
        is only remembered until its values reach something that matters: a gradient, the loss, a
        weight. Where a backward pass ran to its end with finite gradients, whatever stood before
        it was harmless, but for one case: a value that fp16 could not hold is lost even if a later
        function (a clamp, a sigmoid) swallows the infinity. And where several origins meet, those
        whose values were masked away stand back.
    """

    def __init__(self) -> None:
        """Starts with nothing."""
        self.time = 0
        self.origins: list[Origin] = []
        self.reached: list[Origin] = []
        self._finite_gradient_at = -1
        self._mended: set[int] = set()
        self._by_memory: dict[int, Origin] = {}
        self._by_node: dict[int, tuple[Site, Origin]] = {}

    # -- values ----------------------------------------------------------------------------------

    def of(self, tensor: Tensor) -> Origin | None:
        """Returns the origin of what is not finite in a tensor; None if it came from outside."""
        return self._by_memory.get(storage_key(tensor))

    def mark(self, tensor: Tensor, origin: Origin) -> None:
        """Says that what is not finite in a tensor began at ``origin``."""
        self._by_memory[storage_key(tensor)] = origin

    def clean(self, tensor: Tensor) -> None:
        """Says that a tensor was written and is finite."""
        if self._by_memory and covers_storage(tensor):
            self._by_memory.pop(storage_key(tensor), None)

    def forget(self) -> None:
        """Lets go of everything but the origins: nothing more will be seen."""
        self._by_memory.clear()
        self._by_node.clear()

    def begin(self, fault: Fault, *, deliberate: bool = False) -> Origin:
        """Returns a new origin at the present operator."""
        origin = Origin(fault, self.time, deliberate)
        self.origins.append(origin)
        return origin

    def mend(self, origin: Origin) -> None:
        """Says that values of ``origin`` were masked away."""
        self._mended.add(origin.time)

    def heir(self, parents: Iterable[Origin]) -> Origin | None:
        """Returns the origin that a result of several has: the gravest, and of those the first."""
        return min(parents, key=self._gravity, default=None)

    def _gravity(self, origin: Origin) -> tuple[bool, bool, bool, int]:
        stale = origin.fault.cause == "gradients"  # of a step before: it says nothing of this one
        return origin.deliberate, stale, origin.time in self._mended, origin.time

    # -- autograd nodes --------------------------------------------------------------------------

    def tie(self, site: Site, origin: Origin) -> None:
        """Says that the forward operator at ``site`` began ``origin``."""
        self._by_node[id(site)] = site, origin  # the site is held, so that its id stays its own

    def of_node(self, site: Site | None) -> Origin | None:
        """Returns what the forward of an autograd node began: its derivative is infinite, too."""
        return self._by_node.get(id(site), (None, None))[1]

    # -- what matters ----------------------------------------------------------------------------

    def reach(self, origin: Origin) -> None:
        """Says that values of ``origin`` came to a gradient, the loss or a weight."""
        self.reached.append(origin)

    def reach_finite_gradient(self) -> None:
        """Says that a finite gradient came to its parameter."""
        self._finite_gradient_at = self.time

    def first(self) -> Fault | None:
        """Returns the first fault; see Note [When an origin is a fault]."""
        faults = [origin for origin in self.origins if not origin.deliberate]
        lost = [o for o in faults if o.fault.cause == "range" and o.fault.dtype is _FP16]
        pending = [o for o in faults if o.time > self._finite_gradient_at]
        for origins in ([*self.reached, *lost], pending):
            origin = self.heir(origins)
            if origin is not None:
                return origin.fault
        return None
