"""Sums of several passes' gradients in the model's own 16 bits, where the user asks for them.

Note [Sums in 16 bits]
    Autograd adds to ``param.grad``, so a sum in the model's dtype takes no memory beside the
    gradient of one pass. A pass begins by giving the sum so far back to the model, at the scale of
    the pass; autograd adds to it, and the result is deferred (Note [Deferred gradients]).

    There is no second copy to return to: a pass that fails leaves zeros, and the next step is
    skipped unless the gradients are cleared before. Nor does inf leave a sum, and it would lower
    the scale once per pass that follows: the pass after an overflow starts from zeros, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from apex._engine.optimizer import deferred
from apex._engine.optimizer.deferred import Deferred, Factor
from apex._engine.tracked_pair import TrackedPair
from apex._torch import blocks, dtensor
from apex._torch.copies import moved
from apex._torch.counted import without_counting

Sum = tuple[TrackedPair, Tensor]
"""A pair, and the sum of its gradients so far, in 16 bits (this rank's part of a DTensor)."""


@torch.no_grad()
def scaled_by(
    pairs: Iterable[TrackedPair], scale: Factor, overflowed: Tensor | None = None
) -> list[Sum]:
    """Returns the dense gradients so far times ``scale``, in 16 bits.

    Changes no gradient that anybody reads: one that is deferred keeps its value, rescaled.

    Args:
        pairs: Those with and without a gradient.
        scale: The scale of the pass that begins.
        overflowed: Whether the sums hold inf or NaN and start again from zero; 0-d fp32.
    """
    waiting: list[tuple[TrackedPair, Deferred]] = []
    sums: list[Sum] = []
    with without_counting():
        for pair in pairs:
            each = deferred.of(pair.master)
            if each is not None:
                waiting.append((pair, each))
            elif (grad := pair.master.grad) is not None and grad.layout is torch.strided:
                sums.append((pair, _in_low(grad, pair, scale, overflowed)))
        _rescale([each for _, each in waiting], scale, overflowed)
    return sums + [(pair, each.values) for pair, each in waiting]


def _in_low(grad: Tensor, pair: TrackedPair, scale: Factor, overflowed: Tensor | None) -> Tensor:
    value = dtensor.local(grad)
    value = value * (moved(scale, value.device) if isinstance(scale, Tensor) else scale)
    if overflowed is not None:
        value.masked_fill_(moved(overflowed, value.device).bool(), 0.0)
    model = dtensor.local(pair.model)
    return value.to(device=model.device, dtype=model.dtype)


def _rescale(gradients: Sequence[Deferred], scale: Factor, overflowed: Tensor | None) -> None:
    """Multiplies the 16-bit values of deferred gradients by their factors and ``scale``, in fp32.

    The values of the gradients stay the same: their factors are one over ``scale`` afterwards.
    """
    changing = (
        each for each in gradients if overflowed is not None or not _cancel(each.factors, scale)
    )
    for same in deferred.by_device(changing):
        device = same[0].values.device
        lows = [each.values for each in same]
        cuts = blocks.cuts(lows)
        lows = cuts.of_all(lows)
        factors = cuts.each([(*each.factors, scale) for each in same])
        flag = None if overflowed is None else moved(overflowed, device).bool()

        def load(
            block: slice,
            values: list[Tensor],
            lows: Sequence[Tensor] = lows,
            factors: Sequence[Sequence[Factor]] = factors,
            flag: Tensor | None = flag,
        ) -> None:
            deferred.fill_fp32(values, lows[block], factors[block])
            if flag is not None:
                for value in values:
                    value.masked_fill_(flag, 0.0)
            torch._foreach_copy_(list(lows[block]), values)

        operand = blocks.Buffered(cuts, lows, load)
        inverse = (1.0 / scale,)
        for block in cuts.blocks:
            operand.load(block)
        for each in same:
            each.factors = inverse


def _cancel(factors: Sequence[Factor], scale: Factor) -> bool:
    """Returns whether the host knows that factors and scale multiply to 1."""
    known = [factor for factor in (*factors, scale) if not isinstance(factor, Tensor)]
    return len(known) == len(factors) + 1 and math.prod(known) == 1.0


def give_back(sums: Iterable[Sum]) -> dict[int, Deferred | None]:
    """Makes sums the gradients of the model's parameters; the masters have none. Cannot fail.

    Returns:
        By id of the master, the deferred gradient that the sum was, which a script may hold.
    """
    given: dict[int, Deferred | None] = {}
    for pair, values in sums:
        each = given[id(pair.master)] = deferred.of(pair.master)
        if each is not None:
            each.factors = ()  # until the pass ends, it shows scaled values
        pair.master.grad = None
        pair.model.grad, pair.mirrors_grad = dtensor.holding(pair.model, values), False
    return given


@torch.no_grad()
def spoiled(pairs: Iterable[TrackedPair], sums: dict[int, Deferred | None]) -> list[Sum]:
    """Zeroes the sums of a pass that failed, and returns them."""
    found = [
        (pair, grad)
        for pair in pairs
        if id(pair.master) in sums and (grad := pair.model.grad) is not None
    ]
    for _, grad in found:
        grad.zero_()
    return found
