"""NovoGrad over lists of tensors: Adam with one second moment per tensor.

Source: Ginsburg et al., arXiv:1905.11286.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex._core.foreach.adam import AdamRule
from apex._core.foreach.norms import l2_norms, max_norms, stacked
from apex._core.foreach.scalars import Scalar, descend_
from apex._core.foreach.working import store, working

NORMS = {0: max_norms, 2: l2_norms}
"""The norms by ``norm_type``: the largest absolute value, and the 2-norm."""

NOT_STARTED = -1.0
"""A running norm that the first gradient's norm replaces."""


def novograd_(
    lists: Sequence[Sequence[Tensor]],
    norms: Tensor,
    rule: AdamRule,
    step: Scalar,
    skip: Tensor | None = None,
    *,
    norm_type: int,
) -> None:
    """Takes one step in place; tensors of one device, any mix of floating dtypes.

    Args:
        lists: ``[grads, params, exp_avgs]``; at least one of each.
        norms: The running norms of the gradients, ``[N]`` fp32; updated, too.
        rule: The hyperparameters. Without decoupled weight decay, the gradient is also normalized
            before it is averaged.
        step: Count of this step, from 1.
        skip: 0-d flag, 1 to change nothing.
        norm_type: A key of ``NORMS``.
    """
    fresh = stacked(NORMS[norm_type](lists[0]), norms.device)
    blended = _blended(torch.where(norms == NOT_STARTED, fresh, norms), fresh, rule, norm_type)
    first, second = rule.corrections(step)
    denominators = list((blended / second**0.5 + rule.eps).unbind())
    with working(lists, skip) as (given, params, averages):
        grads = given
        if not rule.decoupled:
            grads = rule.decayed(list(torch._foreach_div(given, denominators)), params)
        rule.average_(averages, grads)
        updates = list(torch._foreach_div(averages, first))
        if rule.decoupled:
            updates = rule.decayed(list(torch._foreach_div(updates, denominators)), params)
        descend_(params, updates, rule.lr)
    store([norms], [blended], skip)


def _blended(norms: Tensor, fresh: Tensor, rule: AdamRule, norm_type: int) -> Tensor:
    beta = rule.betas[1]
    if norm_type == 2:
        return torch.sqrt(beta * norms * norms + (1.0 - beta) * fresh * fresh)
    return beta * norms + (1.0 - beta) * fresh
