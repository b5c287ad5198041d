"""Adagrad over lists of tensors.

Source: Duchi, Hazan and Singer, JMLR 2011.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex._core.foreach.gate import Gate, Scalar, add_
from apex._core.foreach.working import store, working


def adagrad_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    sums: Sequence[Tensor],
    *,
    lr: Scalar,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    gate: Gate,
) -> None:
    """Takes one step in place; tensors of one device, any mix of floating dtypes.

    ``sums`` are those of the gradients' squares. Weight decay acts on the parameter directly where
    it is ``decoupled``, else on the gradient.
    """
    if not params:
        return
    weights, gradients, totals = working(params, grads, sums)
    if weight_decay and not decoupled:
        gradients = list(torch._foreach_add(gradients, weights, alpha=weight_decay))
    gradients = gate.gradients(gradients)
    torch._foreach_addcmul_(totals, gradients, gradients)
    denominators = list(torch._foreach_sqrt(totals))
    add_(denominators, gate.coefficient(eps, 1.0))
    updates = list(torch._foreach_div(gradients, denominators))
    if weight_decay and decoupled:
        torch._foreach_add_(updates, weights, alpha=weight_decay)
    gate.descend_(weights, updates, lr)
    store(params, weights)
    store(sums, totals)
