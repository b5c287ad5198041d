"""A master's fp32 gradient, left in 16 bits until somebody reads it.

Note [Deferred gradients]
    The 16-bit gradient of one backward pass holds all there is to know: the fp32 gradient of the
    master is its value times some factors, one over the loss scale and that of a clipped norm. So
    where the optimizer's kernel can take it block by block (:mod:`.one_pass`), no fp32 gradient is
    made. Whoever reads ``master.grad`` gets it: the master's class is then one whose ``grad`` is a
    property. The model's gradient is a lazy tensor: before it is written, the master gets its fp32
    gradient; and where factors are pending, before it is read, too, for it shows the product.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from apex._engine.tracked_pair import TrackedPair
from apex._torch import blocks, dtensor, lazy, parameters
from apex._torch.copies import moved
from apex._torch.counted import CountedGradient, count_writes, without_counting
from apex._torch.dynamo import untraced

Factor = float | Tensor
"""A multiplier of gradients: a number, or 0-d fp32."""

_DEFERRED = "_apex_deferred"
"""Attribute of a master: its :class:`Deferred` gradient."""

_computed: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
"""The version of each gradient that was deferred, when it was computed.

Not an attribute of the gradient: files would hold it.
"""


class Deferred:
    """The 16-bit gradient of a pair, and the factors that make it the gradient of the master.

    Attributes:
        values: The 16-bit gradient; see :class:`apex._torch.lazy.Source`.
        factors: Multipliers, applied in fp32 one after the other.
        counts: Whether the fp32 gradient counts writes; see :mod:`apex._torch.counted`.
    """

    __slots__ = ("__weakref__", "_master", "counts", "factors", "stand_in", "values")

    def __init__(self, pair: TrackedPair, values: Tensor, factors: Sequence[Factor]) -> None:
        """Stores the gradient; :meth:`install` gives it to the master."""
        self.values = values
        self.factors = tuple(factors)
        self._master = weakref.ref(pair.master)
        self.stand_in: Tensor | None = None
        self.counts = False

    @property
    def pending(self) -> bool:
        """Whether the 16-bit values lack factors."""
        return bool(self.factors)

    def mirror(self, param: nn.Parameter) -> Tensor:
        """Returns a gradient for the model's parameter that is settled before a change shows."""
        return dtensor.holding(param, lazy.make(self))

    def install(self) -> None:
        """Makes this the gradient of the master, which has none. Cannot fail."""
        master = self._master()
        if master is not None:
            master.__dict__[_DEFERRED] = self
            master.__class__ = _deferring(type(master))

    @untraced
    def settle(self) -> None:
        """Gives the master its fp32 gradient and the 16-bit one its rounded values."""
        master = self._master()
        owner = master if master is not None and of(master) is self else None
        if owner is None and not self.factors:
            return
        with torch.inference_mode(mode=False), torch.no_grad(), without_counting():
            like = self.values if master is None else dtensor.local(master)
            value = torch.empty_like(like, dtype=torch.float32, requires_grad=False)
            fill_fp32([value], [self.values], [self.factors])
            if self.factors:
                # Not counted, because the script has not written it.
                parameters.uncounted(self.values).copy_(value)
            if owner is not None:
                added = parameters.grad_of(owner)  # by a loss that uses the master directly
                if added is not None:
                    value.add_(dtensor.local(dtensor.laid_out_as(owner, added)))
                drop(owner)
                grad = dtensor.with_local(owner, value)
                if self.counts:
                    count_writes(grad)
                _computed[grad] = grad._version
                owner.grad = grad
        self.factors = ()


class _Deferring:
    """Mixin of a master with a deferred gradient."""

    @property
    def grad(self) -> Tensor | None:
        """The fp32 gradient, computed now; a stand-in while torch may read one."""
        deferred: Deferred | None = self.__dict__.get(_DEFERRED)  # inlined: torch reads it often
        if deferred is not None:
            if deferred.stand_in is not None:
                return deferred.stand_in
            deferred.settle()
        return parameters.grad_of(cast(Tensor, self))

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        parameters.set_grad(self, value)  # first: it may refuse the value
        drop(self)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copies as the master's own class."""
        return copy.deepcopy(_settled(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the master's own class."""
        return _settled(self).__reduce_ex__(protocol)


@functools.cache  # of two kinds of masters
def _deferring(own: Any) -> Any:
    """Returns the class of masters of class ``own`` with a deferred gradient."""
    if issubclass(own, _Deferring):
        return own
    return type(
        own.__name__, (_Deferring, own), {"__module__": own.__module__, "__doc__": own.__doc__}
    )


def _settled(master: Any) -> Any:
    """Returns a master, as one of its own class, with its fp32 gradient."""
    deferred = of(master)
    if deferred is not None:
        deferred.settle()
    return master


def of(master: Any) -> Deferred | None:
    """Returns the deferred gradient of a master, or ``None``."""
    found: Deferred | None = master.__dict__.get(_DEFERRED)
    return found


def has_grad(param: Tensor) -> bool:
    """Returns whether ``param`` has a gradient, without computing a deferred one."""
    return of(param) is not None or param.grad is not None


def is_as_computed(grad: Tensor) -> bool:
    """Returns whether a gradient was deferred and has not been written since it was computed."""
    return bool(_computed.get(grad) == grad._version)


def drop(master: Any) -> None:
    """Takes the deferred gradient from a master, whose own class comes back."""
    master.__dict__.pop(_DEFERRED, None)
    master.__class__ = _own_class(master)


def _own_class(master: Any) -> Any:
    kind = type(master)
    return kind.__bases__[1] if issubclass(kind, _Deferring) else kind


def lend(master: Any) -> Deferred | None:
    """Lets torch read a stand-in as the gradient of ``master``; returns the gradient if deferred.

    Setting its ``stand_in`` to ``None`` reverts it.
    """
    deferred = of(master)
    if deferred is None:
        return None
    if parameters.grad_of(master) is not None:  # a loss that uses the master directly
        deferred.settle()
        return None
    deferred.stand_in = master.detach()
    return deferred


def deferrable(received: Sequence[tuple[TrackedPair, Tensor]]) -> list[Tensor | None]:
    """Returns the values of 16-bit gradients that can be a pair's only one; ``None`` for others.

    They may be laid out in another way than the master; who takes both by blocks compares them.
    """
    masters = [pair.master for pair, _ in received]
    grads = [grad for _, grad in received]
    plain = not dtensor.any_dtensor(grads) and not dtensor.any_dtensor(masters)
    return [
        low
        if type(low) in (Tensor, CountedGradient)
        and low.layout is torch.strided
        and blocks.is_dense(low)
        and not low.requires_grad
        and of(master) is None
        and master.grad is None
        and (plain or dtensor.same_layout(grad, master))
        else None
        for low, grad, master in zip(dtensor.locals_of(grads), grads, masters, strict=True)
    ]


def fill_fp32(
    values: Sequence[Tensor], grads: Sequence[Tensor], factors: Sequence[Sequence[Factor]]
) -> None:
    """Writes 16-bit gradients times their factors into fp32 tensors of the same layout."""
    torch._foreach_copy_(list(values), list(grads))
    if not any(factors):
        return
    groups: dict[tuple[int, ...], tuple[Sequence[Factor], list[Tensor]]] = {}
    for value, own in zip(values, factors, strict=True):
        groups.setdefault(tuple(map(id, own)), (own, []))[1].append(value)
    for own, same in groups.values():
        for factor in own:
            here = moved(factor, same[0].device) if isinstance(factor, Tensor) else factor
            torch._foreach_mul_(same, here)


def by_device(gradients: Iterable[Deferred]) -> Iterable[list[Deferred]]:
    """Returns the gradients in lists of one device."""
    devices: dict[torch.device, list[Deferred]] = {}
    for each in gradients:
        devices.setdefault(each.values.device, []).append(each)
    return devices.values()


def in_fp32(
    deferred: Iterable[Deferred],
    use: Callable[[list[Tensor]], None],
    *,
    scaled: bool = False,
) -> None:
    """Calls ``use`` with fp32 copies of the gradients, a block at a time, on each device.

    Args:
        deferred: Gradients.
        use: Takes tensors that are overwritten afterwards, in the order of the gradients.
        scaled: Whether the copies leave out the factors.
    """
    for same in by_device(deferred):
        lows = [each.values for each in same]
        cuts = blocks.cuts(lows, in_order=True)
        operand = gradients(cuts, same, cuts.of_all(lows), scaled=scaled)
        with torch.no_grad(), without_counting():
            for block in cuts.blocks:
                use(operand.load(block))


def gradients(
    cuts: blocks.Cuts,
    deferred: Sequence[Deferred],
    like: Sequence[Tensor],
    *,
    scaled: bool = False,
) -> blocks.Buffered:
    """Returns gradients as an fp32 operand with strides of the pieces ``like``.

    See :func:`in_fp32`.
    """
    lows = cuts.of_all([each.values for each in deferred])
    factors = cuts.each([() if scaled else each.factors for each in deferred])

    def load(block: slice, values: list[Tensor]) -> None:
        fill_fp32(values, lows[block], factors[block])

    return blocks.Buffered(cuts, like, load)
