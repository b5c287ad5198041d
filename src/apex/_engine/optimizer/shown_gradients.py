"""A model's 16-bit gradient as the view of its master's fp32 one.

Note [Gradients of a pair]
    A model's 16-bit gradient is what a pass writes; the master's is the fp32 sum that clipping and
    the optimizer see. After a pass the model's gradient *shows* the master's: it is marked with its
    version, and while it is there, the master's gradient counts. A script that clears it, by a
    wrapper's ``zero_grad`` or by hand, has cleared both. A new gradient in its place, from a plain
    ``loss.backward()``, replaces both. At a loss scale of exactly 1 the shown gradient is the
    rounded sum, so what is done to it in place (a plain backward adds, a script clips) counts, too;
    at other scales it counts that a script has zeroed it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from apex._engine.masters import TrackedPair
from apex._torch import dtensor

_MARK = "_apex_shown"
"""Attribute of a shown gradient: its version then, and whether changes of it count."""


def rounded(grad: Tensor, param: nn.Parameter) -> Tensor:
    """Returns a master's gradient as ``param`` can show it."""
    return grad.to(device=param.device, dtype=param.dtype)


def show(pair: TrackedPair, *, counts: bool) -> None:
    """Marks the model's gradient as the view of its master's; whether changes of it count."""
    grad = pair.model.grad
    if grad is not None:
        setattr(grad, _MARK, (grad._version, counts))
    pair.shows_grad = grad is not None


def is_taken(grad: Tensor) -> bool:
    """Returns whether the master's gradient holds ``grad``, which is shown, as it is.

    A mark alone says nothing: a bucket of DistributedDataParallel keeps it over the passes.
    """
    return bool(getattr(grad, _MARK, None) == (grad._version, True))


def is_changed(grad: Tensor) -> bool:
    """Returns whether another gradient took the place of a shown one, or a change of it counts."""
    mark = getattr(grad, _MARK, None)
    return mark is None or (mark[1] and mark[0] != grad._version)


def is_touched(pair: TrackedPair) -> bool:
    """Returns whether a shown gradient was written in place, or moved, since it is shown."""
    grad = pair.model.grad
    if grad is None:
        return False
    mark = getattr(grad, _MARK, None)
    return mark is None or bool(mark[0] != grad._version)


@torch.no_grad()
def zero_like_model(pair: TrackedPair) -> None:
    """Zeroes the master's gradient if the model's is zero everywhere."""
    shown, grad = pair.model.grad, pair.master.grad
    if shown is None or grad is None:
        return
    if shown.is_sparse or grad.is_sparse:
        if shown.is_sparse and shown._nnz() == 0:  # known on the host
            pair.master.grad = None
        return
    own, left = dtensor.local(grad), (dtensor.local(shown) != 0).any().to(grad.device)
    own.copy_(torch.where(left, own, 0.0))
