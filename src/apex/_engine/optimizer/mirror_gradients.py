"""A model's 16-bit gradient as a rounded view of its master's fp32 gradient.

Note [Gradients of a pair]
    A backward pass writes the model's 16-bit gradient; the optimizer uses the master's, the
    unscaled fp32 sum. After a pass the model's gradient *mirrors* the master's: it holds the
    rounded value, it is marked with its version, and while it exists, the master's gradient is
    valid. A script that clears it, by a wrapper's ``zero_grad`` or by hand, clears both.

    Any other change of it, in place or by assignment, is carried over to the master's gradient
    when that is next used (:func:`carry_over`), so that clipping ``model.parameters()`` works.
    Gradients scaled by a factor, as by ``clip_grad_norm_``, scale the master's gradients by the
    same factor, which keeps their fp32 bits and the elements that the mirror rounds to zero. Other
    changes (clipped values, masks, noise, another plain ``loss.backward()``) replace the elements
    that changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from apex._core.foreach import norms
from apex._engine.tracked_pair import TrackedPair
from apex._torch import dtensor, foreach
from apex._torch.counted import count_writes

_MARK = "_apex_mirrored"
"""Attribute of a mirror gradient: its version when it held the rounded master's gradient."""

_CHUNK = 2**24
"""Elements that :func:`carry_over` processes at once, which bounds its memory."""


def rounded(grad: Tensor, param: nn.Parameter) -> Tensor:
    """Returns a master's gradient in the dtype and on the device of ``param``."""
    return grad.to(device=param.device, dtype=param.dtype)


def mark(pairs: Iterable[TrackedPair]) -> None:
    """Marks the models' gradients as the rounded values of their masters'."""
    for pair in pairs:
        grad = pair.model.grad
        pair.mirrors_grad = grad is not None
        if grad is not None:
            pair.mirror_id = id(grad)
            setattr(grad, _MARK, grad._version)
            count_writes(grad)


def mark_again(pair: TrackedPair) -> None:
    """Marks a mirror gradient that was zeroed with its master's.

    One that a script has cleared meanwhile stays noted, so that its master's is cleared, too.
    """
    if pair.mirrors_grad and pair.model.grad is not None:
        mark([pair])


def is_included(grad: Tensor) -> bool:
    """Returns whether the master's gradient already includes ``grad``, a mirror gradient.

    The mark alone is not enough: a DistributedDataParallel bucket keeps it across passes.
    """
    return bool(getattr(grad, _MARK, None) == grad._version)


def is_modified(pair: TrackedPair, grad: Tensor, *, in_buckets: bool) -> bool:
    """Returns whether a mirror gradient was written in place or replaced since it was marked.

    Args:
        pair: The pair.
        grad: The gradient in the mirror's place, which may be the mirror of another pair.
        in_buckets: Whether gradients are views of DistributedDataParallel's buckets. It replaces
            them, with the same values, when it rebuilds its buckets.
    """
    version = getattr(grad, _MARK, None)
    if version is None:
        return not in_buckets
    return bool(version != grad._version or pair.mirror_id != id(grad))


def write(pairs: Sequence[TrackedPair], totals: Sequence[Tensor]) -> None:
    """Rounds gradients of masters into the models' present gradients, with their graphs if any."""
    mirrors: list[Tensor] = []
    dense: list[Tensor] = []
    for pair, total in zip(pairs, totals, strict=True):
        grad = pair.model.grad
        if grad is None:
            continue
        if grad.is_sparse or total.is_sparse:
            pair.model.grad = rounded(total, pair.model)
        else:
            mirrors.append(grad)
            dense.append(total)
    if mirrors:
        foreach.assign_(dtensor.locals_of(mirrors), dtensor.locals_of(dense))


def write_again(pairs: Iterable[TrackedPair]) -> None:
    """Gives models their mirror gradients back after a failed pass, as far as memory suffices."""
    for pair in pairs:
        grad = pair.master.grad
        if grad is None or pair.model.grad is not None:
            continue
        try:
            pair.model.grad = rounded(grad, pair.model)
        except RuntimeError:  # out of memory: the model has no mirror, but no gradient is lost
            continue
        mark([pair])


@torch.no_grad()
def carry_over(pairs: Sequence[TrackedPair]) -> None:
    """Applies changes of dense mirror gradients to their masters' gradients, without a host sync.

    See Note [Gradients of a pair].
    """
    groups: dict[object, list[tuple[Tensor, Tensor]]] = {}
    for pair in pairs:
        mirror, own = pair.model.grad, pair.master.grad
        if mirror is None or own is None:
            continue
        # Ranks hold different parts of a DTensor, but must agree on the factor of a replicated one.
        apart = dtensor.is_dtensor(own)
        key = id(own) if apart else (own.device, mirror.dtype)
        groups.setdefault(key, []).append((dtensor.local(mirror), dtensor.local(own)))
    for changes in groups.values():
        _carry_over(changes)


_Change = tuple[Tensor, Tensor]
"""A changed mirror gradient, and its master's gradient from before the change."""


def _carry_over(changes: Sequence[_Change]) -> None:
    """Applies changes that may share a factor: gradients of one device and dtype."""
    before: list[Tensor] = []
    after: list[Tensor] = []
    for chunk in _chunks(changes):
        news, olds, _ = _in_fp32(chunk)
        before += norms.l2_norms(olds)
        after += norms.l2_norms(news)
    device = changes[0][1].device
    olds_norms, news_norms = norms.stacked(before, device), norms.stacked(after, device)
    shared = norms.total(news_norms) / norms.total(olds_norms)
    start = 0
    for chunk in _chunks(changes):
        part = slice(start, start + len(chunk))
        _scale_or_replace(chunk, shared, news_norms[part] / olds_norms[part])
        start += len(chunk)


def _chunks(changes: Sequence[_Change]) -> Iterator[Sequence[_Change]]:
    chunk: list[_Change] = []
    elements = 0
    for change in changes:
        chunk.append(change)
        elements += change[1].numel()
        if elements >= _CHUNK:
            yield chunk
            chunk, elements = [], 0
    if chunk:
        yield chunk


def _in_fp32(changes: Sequence[_Change]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Returns the mirrors and their values before the change as fp32, and the latter in 16 bits."""
    own = [grad for _, grad in changes]
    low = [torch.empty_like(grad, dtype=mirror.dtype) for mirror, grad in changes]
    news, olds = ([torch.empty_like(grad) for grad in own] for _ in range(2))
    torch._foreach_copy_(low, own)
    torch._foreach_copy_(olds, low)
    torch._foreach_copy_(news, [mirror for mirror, _ in changes])
    return news, olds, low


def _scale_or_replace(changes: Sequence[_Change], shared: Tensor, own_factors: Tensor) -> None:
    """Scales the gradients that were scaled by a factor; replaces elements of the others.

    Args:
        changes: The gradients.
        shared: The factor (0-d) if all gradients of the model were scaled by one.
        own_factors: The factors (``[N]``) if each was scaled by its own.
    """
    dtype = changes[0][0].dtype
    news, olds, low = _in_fp32(changes)
    with_shared = _are_scaled(news, olds, shared, dtype)
    factors = torch.where(with_shared, shared, own_factors)
    scaled = with_shared | _are_scaled(news, olds, list(own_factors.unbind()), dtype)
    # Closer to 1 it is a change of single elements; a 16-bit factor is not.
    scaled &= (factors - 1).abs() >= torch.finfo(dtype).eps / 4
    # Without any nonzero gradient there is no factor: zeroing and scaling look the same.
    known = shared.isfinite()
    factors = torch.where(scaled, factors, 1.0)
    parts = zip(changes, news, low, factors.unbind(), scaled.unbind(), strict=True)
    for (mirror, own), new, old, factor, is_scaled in parts:
        same = (mirror.to(old.device) == old).logical_and_(known)
        # A script that zeroes elements also means those that the mirror rounds to zero.
        zero = new == 0
        masked = (zero & (old != 0)).any()
        keeps = same & ~(zero & masked)
        own.mul_(factor)
        own.copy_(torch.where(keeps.logical_or_(is_scaled), own, new))


def _are_scaled(
    news: list[Tensor], olds: list[Tensor], factors: Tensor | list[Tensor], dtype: torch.dtype
) -> Tensor:
    """Returns whether each tensor was multiplied by its factor in ``dtype``: bool, ``[N]``.

    The factor is an average of the elements' own, which rounding spreads by one eps.
    """
    limits = torch.finfo(dtype)
    expected = torch._foreach_mul(olds, factors)
    excess = torch._foreach_sub(news, expected)
    torch._foreach_abs_(excess)
    torch._foreach_abs_(expected)
    torch._foreach_mul_(expected, 2 * limits.eps)
    torch._foreach_add_(expected, 2 * limits.smallest_normal * limits.eps)
    torch._foreach_sub_(excess, expected)
    torch._foreach_clamp_min_(excess, 0.0)  # NaN stays, which no factor explains
    return norms.stacked(norms.max_norms(excess), olds[0].device) == 0
