"""Adagrad over lists of tensors.

Source: Duchi, Hazan and Singer, JMLR 2011.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex._core.foreach.scalars import Scalar, descend_
from apex._core.foreach.working import working


def adagrad_(
    lists: Sequence[Sequence[Tensor]],
    skip: Tensor | None = None,
    *,
    lr: Scalar,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """Takes one step in place; tensors of one device, any mix of floating dtypes.

    ``lists`` are ``[grads, params, sums]``, the last of the gradients' squares. Weight decay acts
    on the parameter directly where it is ``decoupled``, else on the gradient. If 0-d ``skip`` is 1,
    nothing changes.
    """
    with working(lists, skip) as (given, params, sums):
        grads = given
        if weight_decay and not decoupled:
            grads = list(torch._foreach_add(given, params, alpha=weight_decay))
        torch._foreach_addcmul_(sums, grads, grads)
        denominators = list(torch._foreach_sqrt(sums))
        torch._foreach_add_(denominators, eps)
        updates = list(torch._foreach_div(grads, denominators))
        if weight_decay and decoupled:
            torch._foreach_add_(updates, params, alpha=weight_decay)
        descend_(params, updates, lr)
