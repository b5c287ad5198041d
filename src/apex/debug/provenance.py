"""Follows non-finite values from the operator that produced them first."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, UntypedStorage
from torch.utils.weak import WeakIdKeyDictionary

from apex.debug.faults import Fault
from apex.debug.tensors import covers_storage, dense

_FP16 = torch.float16
_MAX_READERS = 8


@dataclass(eq=False)
class Origin:
    """The operator that first produced a non-finite value, and what has become of it.

    Attributes:
        fault: The operator and its cause.
        time: Number of operators traced before it.
        deliberate: Whether the value is intended, as a constant or a mask.
        masked_out: Whether values were masked out.
        absorbed: Whether a softmax or exp mapped -inf to 0, as is right.
        spoils_only: Whether values reached weights or buffers, but no gradient and no loss.
        readers: Operators that read the values, in order, at most eight.
        times: Number of harmless origins at its place, of which it is the first.
    """

    fault: Fault
    time: int
    deliberate: bool
    masked_out: bool = False
    absorbed: bool = False
    spoils_only: bool = False
    readers: list[str] = field(default_factory=list)
    times: int = 0

    @property
    def place(self) -> tuple[str, str]:
        """The operator and the line of code."""
        return self.fault.op, self.fault.location

    def rank(self) -> tuple[bool, bool, bool, bool, int]:
        """Returns what sorts origins, the most severe first."""
        stale = self.fault.cause == "gradients"  # left by an earlier step
        return self.deliberate, self.spoils_only, stale, self.masked_out, self.time

    @property
    def is_lost(self) -> bool:
        """Whether fp16 lost a value that no softmax or exp has mapped to the right result."""
        return self.fault.cause == "range" and self.fault.dtype is _FP16 and not self.absorbed


class Provenance:
    """The origins of all live non-finite values, by the memory that holds them.

    Note [When an origin is a fault]
        Infinities can be deliberate (masks), and NaNs can be produced and masked out again: torch's
        own formula for the derivative of a norm divides 0 by 0 and replaces the result. So an
        origin counts as a fault only once its values reach a gradient, the loss or a weight. If a
        backward pass completes with finite gradients, all earlier origins were harmless, with one
        exception: a value beyond fp16's range is lost even if a later function (a clamp, a
        sigmoid) maps the infinity to a finite value. Only softmax and exp return the right result
        for -inf. Where several origins meet, those whose values were masked out come last, behind
        them those that got no further than weights and buffers, such as a running mean in training.
        When a trace ends, origins that no backward pass has judged count unless they were masked
        out, or were harmless before at the same operator and line (a metric).

    Note [Long traces]
        A trace may last as long as a training. So origins are discarded once they are harmless, one
        lost value is kept per line of code, and only the latest autograd nodes are remembered (by
        the ``ModuleTracker``).
    """

    def __init__(self) -> None:
        self.time = 0
        self.passes = 0
        self.gradients: list[str] = []  # names of parameters that a fault reached
        self.healed: set[int] = set()
        self.is_certain = False  # whether values of a fault that no scale heals got that far
        self._harmless: dict[tuple[str, str], Origin] = {}  # the first at each operator and line
        self._backward = -1
        self._pending: list[Origin] = []
        self._lost: dict[tuple[str, str, str], Origin] = {}
        self._reached: dict[Origin, None] = {}
        self._by_memory: MutableMapping[UntypedStorage, Origin] = WeakIdKeyDictionary()
        self._received: MutableMapping[UntypedStorage, None] = WeakIdKeyDictionary()

    # -- values ----------------------------------------------------------------------------------

    def of(self, tensor: Tensor) -> Origin | None:
        """Returns the origin of a tensor's non-finite values; None if they came from outside."""
        return self._by_memory.get(dense(tensor).untyped_storage())

    def mark(self, tensor: Tensor, origin: Origin) -> None:
        """Records ``origin`` for the non-finite values of a tensor."""
        self._by_memory[dense(tensor).untyped_storage()] = origin

    def mark_received(self, tensor: Tensor) -> None:
        """Records that other processes write to a tensor."""
        storage = dense(tensor).untyped_storage()
        self._received[storage] = None
        known = self._by_memory.get(storage)
        if known is not None and known.fault.cause == "uninitialized":  # parts come one by one
            del self._by_memory[storage]
        self.clear(tensor)

    def is_received(self, tensor: Tensor) -> bool:
        """Returns whether other processes wrote to the memory of a tensor."""
        return dense(tensor).untyped_storage() in self._received

    def clear(self, tensor: Tensor) -> None:
        """Records that a tensor was written and is finite."""
        if self._by_memory and covers_storage(tensor):
            self._by_memory.pop(dense(tensor).untyped_storage(), None)

    def close(self) -> None:
        """Releases all values, once tracing has ended."""
        self._by_memory.clear()
        self._received.clear()

    def add_origin(self, fault: Fault, *, deliberate: bool = False) -> Origin:
        """Returns a new origin at the current operator."""
        origin = Origin(fault, self.time, deliberate)
        if deliberate:
            return origin
        self._pending.append(origin)
        if origin.is_lost:
            self._lost.setdefault((fault.module, fault.op, fault.location), origin)
        return origin

    def mark_masked(self, origin: Origin) -> None:
        """Records that values of ``origin`` were masked out."""
        origin.masked_out = not origin.deliberate

    def mark_absorbed(self, origin: Origin) -> None:
        """Records that a softmax or exp mapped -inf of ``origin`` to 0, as is right."""
        origin.absorbed = True

    def mark_read(self, origin: Origin, op: str) -> None:
        """Records that an operator read values of ``origin``."""
        if len(origin.readers) < _MAX_READERS and op not in origin.readers:
            origin.readers.append(op)

    # -- faults ----------------------------------------------------------------------------------

    def mark_reached(self, origin: Origin, *, spoils: bool = False) -> None:
        """Records that values of ``origin`` reached the loss, a weight or a buffer.

        ``spoils`` says that they reached a weight or a buffer.
        """
        self._mark_reached(origin, spoils=spoils)
        if origin.fault.heals:
            origin.fault = replace(origin.fault, stepped=True)
        self.is_certain = True

    def mark_gradient(self, name: str, origin: Origin | None, *, backward: int) -> None:
        """Records that backward pass number ``backward`` adds to the gradient of a parameter.

        ``origin`` is that of its non-finite values; None if it is finite, when ``name`` is not
        read. A dynamic loss scale skips the step of a pass that overflows, and backs off.
        """
        self.passes += backward != self._backward
        self._backward = backward
        if origin is None:
            for each in self._pending:
                if not (each in self._reached or each.fault.heals or each.is_lost):
                    self._harmless.setdefault(each.place, each).times += 1
            self._pending.clear()
            return
        if name not in self.gradients:
            self.gradients.append(name)
        self._mark_reached(origin)
        if origin.fault.heals:
            self.healed.add(backward)
        else:
            self.is_certain = True

    def _mark_reached(self, origin: Origin, *, spoils: bool = False) -> None:
        origin.spoils_only = spoils and (origin.spoils_only or origin not in self._reached)
        self._reached.setdefault(origin)

    @property
    def harmless(self) -> list[Origin]:
        """The first origin at each place of which none reached a gradient.

        Finite gradients of another loss tell nothing.
        """
        reached = {origin.place for origin in self._reached}
        return [origin for place, origin in self._harmless.items() if place not in reached]

    @property
    def has_pending(self) -> bool:
        """Whether an origin may yet turn out to be a fault."""
        return bool(self._pending)

    def first(self, *, healing: bool = True) -> Fault | None:
        """Returns the fault of the first origin that is one."""
        origin = self.first_origin(healing=healing)
        return None if origin is None else replace(origin.fault, read_by=tuple(origin.readers))

    def first_origin(self, *, healing: bool = True) -> Origin | None:
        """Returns the first origin that is a fault; see Note [When an origin is a fault].

        With ``healing``, an overflow from which a dynamic loss scale backs off counts as one, if
        there is no other.
        """
        lost = [origin for origin in self._lost.values() if origin.is_lost]
        unhealed = [origin for origin in self._reached if not origin.fault.heals]
        unjudged = [o for o in self._pending if not o.masked_out and o.place not in self._harmless]
        pending = [o for o in unjudged if healing or not o.fault.heals]
        kinds = [*unhealed, *lost], self._reached if healing else (), pending
        return next((min(origins, key=Origin.rank) for origins in kinds if origins), None)
