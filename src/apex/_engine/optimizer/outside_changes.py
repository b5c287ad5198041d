"""Applies changes of the models' gradients that were made outside passes to the masters' gradients.

These are gradients of a plain ``loss.backward()``, and mirror gradients that a script cleared,
clipped or wrote in another way; see :mod:`.mirror_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from apex._core import master
from apex._engine.optimizer import deferred, mirror_gradients
from apex._engine.optimizer.deferred import Deferred
from apex._engine.tracked_pair import TrackedPair
from apex._torch.counted import without_counting


def absorb(pairs: Sequence[TrackedPair], *, in_buckets: bool, defers: Callable[[], bool]) -> bool:
    """Applies all changes; returns whether the values of mirror gradients were among them.

    Args:
        pairs: The pairs of an optimizer.
        in_buckets: Whether gradients are views of DistributedDataParallel's buckets.
        defers: Returns whether gradients stay in 16 bits until they are read.
    """
    raw: list[TrackedPair] = []
    modified: list[TrackedPair] = []
    with without_counting():
        for pair in pairs:
            grad = pair.model.grad
            if grad is None:
                if pair.mirrors_grad:  # cleared
                    pair.master.grad, pair.mirrors_grad = None, False
            elif not pair.mirrors_grad:
                raw.append(pair)
            elif mirror_gradients.is_modified(pair, grad, in_buckets=in_buckets):
                modified.append(pair)
        if raw:
            add(_left_low(raw) if defers() else raw)
        if modified:
            _carry_over(modified)
    return bool(modified)


def _left_low(raw: Sequence[TrackedPair]) -> list[TrackedPair]:
    """Leaves gradients of a plain backward pass in 16 bits; returns those that cannot stay so.

    What DistributedDataParallel's next pass would overwrite cannot: a view of its buckets.
    """
    rest: list[TrackedPair] = []
    received = [(pair, grad) for pair in raw if (grad := pair.model.grad) is not None]
    for (pair, _), values in zip(received, deferred.deferrable(received), strict=True):
        if values is None or not _owns_storage(values):
            rest.append(pair)
            continue
        each = Deferred(pair, values, ())
        pair.model.grad = each.mirror(pair.model)
        each.install()
        mirror_gradients.mark([pair])
    return rest


def _owns_storage(values: Tensor) -> bool:
    return values.untyped_storage().nbytes() == values.nbytes


def add(raw: Sequence[TrackedPair]) -> None:
    """Adds the models' gradients, which are unscaled, to the masters'."""
    if not raw:
        return
    grads = [grad for pair in raw if (grad := pair.model.grad) is not None]
    own = [pair.master for pair in raw]
    fresh = master.fp32_copies(grads, [pair.model for pair in raw], own)
    earlier = [param.grad for param in own]
    totals = master.sums(fresh, earlier)
    added = [i for i, grad in enumerate(earlier) if grad is not None]
    mirror_gradients.write([raw[i] for i in added], [totals[i] for i in added])
    for pair, grad in zip(raw, totals, strict=True):
        pair.master.grad = grad
        mirror_gradients.mark([pair])


def _carry_over(modified: Sequence[TrackedPair]) -> None:
    """Applies changes of mirror gradients to the masters'."""
    dense: list[TrackedPair] = []
    for pair in modified:
        mirror, own = pair.model.grad, pair.master.grad
        if mirror is None or own is None or mirror.is_sparse or own.is_sparse:
            pair.master.grad = None  # replaced as a whole
        else:
            dense.append(pair)
    add([pair for pair in modified if pair.master.grad is None])
    mirror_gradients.carry_over(dense)
    mirror_gradients.mark(dense)
