"""Adds the 16-bit gradients of a pass to fp32 sums, block by block.

Note [Sums in fp32]
    From the second pass on, the gradient of a master is a sum. An fp32 copy of what a pass adds
    would take 4 bytes per parameter beside it, so a large model has a copy of one block at a time.
    Until a pass is known to succeed it changes no gradient from before; then it adds in place, as
    autograd does, with buffers that it has allocated before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from apex._engine.optimizer import deferred
from apex._engine.optimizer.deferred import Deferred, Factor
from apex._engine.tracked_pair import TrackedPair
from apex._torch import blocks, dtensor
from apex._torch.counted import CountedGradient, without_counting

Received = list[tuple[TrackedPair, Tensor]]

_PLAIN = (Tensor, CountedGradient)


class Added(NamedTuple):
    """What a pass adds to one sum.

    Attributes:
        gradient: The gradient of the model's parameter, which need not be that of its master.
        total: The fp32 sum, laid out alike.
    """

    gradient: Deferred
    total: Tensor


class Sums:
    """Gradients of one device, and the sums to which they are added."""

    def __init__(self, added: Sequence[Added]) -> None:
        """Allocates all that :meth:`add` needs.

        Args:
            added: What :func:`split` found on one device.
        """
        gradients, totals = zip(*added, strict=True)
        cuts = blocks.cuts(totals)
        self._blocks = cuts.blocks
        self._totals = cuts.of_all(totals)
        self._lows = cuts.of_all([each.values for each in gradients])
        self._added = deferred.gradients(cuts, gradients, self._totals)

    def add(self) -> None:
        """Adds the gradients, and rounds the sums into their memory. Cannot fail."""
        with torch.no_grad(), without_counting():
            for block in self._blocks:
                totals = self._totals[block]
                torch._foreach_add_(totals, self._added.load(block))
                torch._foreach_copy_(self._lows[block], totals)


def split(
    received: Received, factors: Sequence[Factor], aside: Iterable[tuple[nn.Parameter, Tensor]]
) -> tuple[list[list[Added]], Received]:
    """Returns the gradients that can be added in place, in lists of one device, and the others.

    Args:
        received: Pairs, and the gradients of their models' parameters.
        factors: What makes a gradient the master's.
        aside: Parameters and their gradients that were set aside.
    """
    before = {id(param): grad for param, grad in aside}
    rest: Received = []
    by_device: dict[torch.device, list[Added]] = {}
    for (pair, grad), total in zip(received, _totals(received, before), strict=True):
        if total is None:
            rest.append((pair, grad))
            continue
        gradient = Deferred(pair, dtensor.local(grad), factors)
        by_device.setdefault(total.device, []).append(Added(gradient, total))
    return list(by_device.values()), rest


def _totals(received: Received, aside: Mapping[int, Tensor]) -> list[Tensor | None]:
    """Returns the fp32 sums to which gradients can be added; ``None`` for the others."""
    found: list[Tensor | None] = [None] * len(received)
    candidates: dict[int, tuple[int, Tensor, Tensor]] = {}
    for index, (pair, grad) in enumerate(received):
        total = _earlier(pair.master, aside)
        if total is None or not (_like(pair.master, grad) and _like(pair.master, total)):
            continue
        low, own = dtensor.local(grad), dtensor.local(total)
        if _is_plain(low) and _is_plain(own) and own.dtype is torch.float32 and own.numel():
            if own.data_ptr() in candidates:  # one tensor is the gradient of two masters
                return [None] * len(received)
            candidates[own.data_ptr()] = index, low, own
    if candidates:
        indices, lows, owns = zip(*candidates.values(), strict=True)
        for index, own, alike in zip(indices, owns, blocks.alike(lows, owns), strict=True):
            found[index] = own if alike else None
    return found


def _earlier(master: nn.Parameter, aside: Mapping[int, Tensor]) -> Tensor | None:
    """Returns the gradient of a master from before the pass, if that is its only one."""
    before, present = aside.get(id(master)), master.grad
    if before is not None and present is not None:  # a loss that uses the master directly
        return None
    return present if before is None else before


def _like(master: nn.Parameter, grad: Tensor) -> bool:
    return dtensor.same_layout(grad, master)


def _is_plain(grad: Tensor) -> bool:
    if type(grad) not in _PLAIN or grad.layout is not torch.strided:
        return False
    return not (grad.requires_grad or grad.is_inference())
