"""What a backward pass sets aside, receives and ends with; :mod:`.gradients` sets it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from apex._core import finite, master
from apex._engine.masters import TrackedPair
from apex._engine.optimizer import deferred, mirror_gradients
from apex._engine.optimizer.deferred import Deferred, Factor

Grads = list[tuple[nn.Parameter, Tensor]]
"""Parameters and their gradients."""

Received = list[tuple[TrackedPair, Tensor]]
"""Pairs and the gradients of their model parameters."""


def present(params: Iterable[nn.Parameter], *, keeps: bool) -> Grads:
    """Returns the gradients to set aside, copied unless they keep their values."""
    # Masters included: a loss that uses them directly gives them scaled gradients.
    found = [(param, grad) for param in params if (grad := param.grad) is not None]
    once = {id(param): (param, grad) for param, grad in found}
    return [(param, grad if keeps else grad.clone()) for param, grad in once.values()]


def unreduced(
    pairs: Sequence[TrackedPair],
    params: Iterable[nn.Parameter],
    scale: Tensor | float,
    *,
    identity: bool,
) -> tuple[Grads, Grads]:
    """Returns the unreduced gradients, and scaled copies for the tensors that accumulate."""
    places = {id(pair.master): (pair.master, pair.model) for pair in pairs}
    if not identity:
        places = {id(param): places.get(id(param), (param, param)) for param in params}
    aside = [(own, grad) for own, _ in places.values() if (grad := own.grad) is not None]
    back = [
        (target, (grad * scale).to(device=target.device, dtype=target.dtype))
        for own, target in places.values()
        if (grad := own.grad) is not None
    ]
    return aside, back


def received(pairs: Iterable[TrackedPair], done: set[int] | None) -> Received:
    """Returns the pairs whose model parameter received a gradient, and that gradient.

    Leaves out those whose model parameter is in ``done``, by id; adds the others to it.
    """
    found = [
        (pair, grad)
        for pair in pairs
        if (grad := pair.model.grad) is not None
        and not (pair.mirrors_grad and mirror_gradients.is_included(grad))
        and not (done and id(pair.model) in done)
    ]
    if done is not None:
        done.update(id(pair.model) for pair, _ in found)
    return found


def left_low(
    received: Received,
    factors: Sequence[Factor],
    aside: Grads,
    sums: dict[int, Deferred | None],
) -> tuple[list[Deferred], Grads, Received]:
    """Returns the gradients that stay in 16 bits, the models' mirrors of them, and the others.

    Args:
        received: What the pass brought.
        factors: What makes a gradient the master's.
        aside: Gradients that are added.
        sums: By id of the master, the deferred gradient to which the pass added.
    """
    added = {id(param) for param, _ in aside}
    low: list[Deferred] = []
    mirrors: Grads = []
    rest: Received = []
    for (pair, grad), values in zip(received, deferred.deferrable(received), strict=True):
        if values is None or id(pair.master) in added:
            rest.append((pair, grad))
            continue
        earlier = sums.get(id(pair.master))
        if earlier is not None and earlier.values is values:
            each, each.factors = earlier, tuple(factors)
        else:
            each = Deferred(pair, values, factors)
        low.append(each)
        mirrors.append((pair.model, each.mirror(pair.model)))
    return low, mirrors, rest


def direct_values(params: list[nn.Parameter], done: set[int] | None) -> list[Tensor]:
    """Returns the gradients of parameters that are not in ``done``, by id; adds these to it.

    They are dense; see :func:`apex._core.finite.values_of`.
    """
    ids = {*map(id, params)}
    if done or len(ids) < len(params):
        params = list({id(p): p for p in params if not done or id(p) not in done}.values())
    if done is not None:
        done |= ids
    return finite.values_of(params)


def with_aside(fresh: Grads, aside: Grads) -> Grads:
    """Returns the gradients of a pass plus those set aside; parameters of ``fresh`` come first."""
    known = {id(param) for param, _ in fresh}
    params = [param for param, _ in aside if id(param) not in known]
    fresh = fresh + [(param, grad) for param in params if (grad := param.grad) is not None]
    earlier = {id(param): grad for param, grad in aside}
    added = [earlier.get(id(param)) for param, _ in fresh]
    total = master.sums([grad for _, grad in fresh], added)
    return [(param, grad) for (param, _), grad in zip(fresh, total, strict=True)]


def mirrors_of_unreached(pairs: Iterable[TrackedPair], aside: Grads) -> Grads:
    """Returns gradients for model parameters without one whose master has one, perhaps aside."""
    earlier = {id(param): grad for param, grad in aside}
    mirrors: Grads = []
    for pair in pairs:
        if pair.model.grad is not None:
            continue
        waiting = deferred.of(pair.master)
        if waiting is not None:
            mirrors.append((pair.model, waiting.mirror(pair.model)))
        elif (grad := earlier.get(id(pair.master), pair.master.grad)) is not None:
            mirrors.append((pair.model, mirror_gradients.rounded(grad, pair.model)))
    return mirrors
