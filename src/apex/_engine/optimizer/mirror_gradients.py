"""A model's 16-bit gradient as a rounded view of its master's fp32 gradient.

Note [Gradients of a pair]
    A backward pass writes the model's 16-bit gradient; clipping and the optimizer use the master's,
    the fp32 sum. After a pass the model's gradient *mirrors* the master's: it is marked with its
    version, and while it exists, the master's gradient is valid. A script that clears it, by a
    wrapper's ``zero_grad`` or by hand, clears both. A new gradient in its place, from a plain
    ``loss.backward()``, replaces both. At a loss scale of exactly 1 the mirror gradient is the
    rounded sum, so in-place changes (a plain backward adds, a script clips) apply to the master,
    too; at other scales only zeroing it does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from apex._engine.masters import TrackedPair
from apex._torch import dtensor

_MARK = "_apex_mirrored"
"""Attribute of a mirror gradient: its version when marked, and whether in-place changes apply."""


def rounded(grad: Tensor, param: nn.Parameter) -> Tensor:
    """Returns a master's gradient in the dtype and on the device of ``param``."""
    return grad.to(device=param.device, dtype=param.dtype)


def mark(pair: TrackedPair, *, edits_apply: bool) -> None:
    """Marks the model's gradient as a view of its master's.

    Args:
        pair: The parameters.
        edits_apply: Whether in-place changes apply to the master's gradient.
    """
    grad = pair.model.grad
    if grad is not None:
        setattr(grad, _MARK, (grad._version, edits_apply))
    pair.mirrors_grad = grad is not None


def is_included(grad: Tensor) -> bool:
    """Returns whether the master's gradient already includes ``grad``, a mirror gradient.

    The mark alone is not enough: a DistributedDataParallel bucket keeps it across passes.
    """
    return bool(getattr(grad, _MARK, None) == (grad._version, True))


def replaces_master_grad(grad: Tensor) -> bool:
    """Returns whether a mirror gradient was replaced, or changed in a way that applies."""
    mark = getattr(grad, _MARK, None)
    return mark is None or (mark[1] and mark[0] != grad._version)


def is_modified(pair: TrackedPair) -> bool:
    """Returns whether a mirror gradient was written in place or replaced since it was marked."""
    grad = pair.model.grad
    if grad is None:
        return False
    mark = getattr(grad, _MARK, None)
    return mark is None or bool(mark[0] != grad._version)


@torch.no_grad()
def zero_like_model(pair: TrackedPair) -> None:
    """Zeroes the master's gradient if the model's is all zero."""
    mirror, grad = pair.model.grad, pair.master.grad
    if mirror is None or grad is None:
        return
    if mirror.is_sparse or grad.is_sparse:
        if mirror.is_sparse and mirror._nnz() == 0:  # known on the host
            pair.master.grad = None
        return
    own, left = dtensor.local(grad), (dtensor.local(mirror) != 0).any().to(grad.device)
    own.copy_(torch.where(left, own, 0.0))
