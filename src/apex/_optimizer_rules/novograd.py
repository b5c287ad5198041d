"""NovoGrad over lists of tensors: SGD with momentum, at a rate of its own for each tensor.

Source: Ginsburg et al., arXiv:1905.11286.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex._core.foreach.norms import LARGEST, norms_of
from apex._optimizer_rules.adam import AdamRule
from apex._optimizer_rules.scalars import Scalar, decay_, decayed, descend_each_
from apex._optimizer_rules.sgd import SGDRule, sgd_
from apex._optimizer_rules.working import store, working

NORMS = {0: LARGEST, 2: 2.0}
"""The order of the norm by ``norm_type``: the largest absolute value, or the 2-norm."""

NOT_STARTED = -1.0
"""A running norm that the first gradient's norm replaces."""


def novograd_(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    norms: Tensor,
    rule: AdamRule,
    step: Scalar,
    skip: Tensor | None = None,
    *,
    norm_type: int,
) -> None:
    """Takes one step in place; tensors of one device, any mix of floating dtypes.

    Args:
        grads: Gradients; at least one.
        params: Their parameters.
        exp_avgs: The averages of the gradients.
        norms: The running norms of the gradients, ``[N]`` fp32; also updated.
        rule: The hyperparameters. Without decoupled weight decay, the gradient is also normalized
            before it is averaged.
        step: Count of this step, from 1.
        skip: 0-d flag, 1 to change nothing.
        norm_type: A key of ``NORMS``.
    """
    fresh = norms_of(grads, NORMS[norm_type], norms.device)
    started = torch.where(norms == NOT_STARTED, fresh, norms)
    beta = rule.betas[1]
    if norm_type == 2:
        blended = torch.sqrt(beta * started * started + (1.0 - beta) * fresh * fresh)
    else:
        blended = beta * started + (1.0 - beta) * fresh
    first, second = rule.corrections(step)
    denominators = blended / second**0.5 + rule.eps
    with working(grads, params, exp_avgs) as (wide_grads, weights, averages):
        if rule.decoupled:
            # At a rate of 0, torch's kernel updates only the averages, and obeys the skip flag.
            sgd_(wide_grads, weights, averages, _momentum(rule, 0.0), skip)
            decay_(weights, rule.lr, rule.weight_decay, skip)
            descend_each_(weights, averages, rule.lr / (first * denominators), skip)
        else:
            normalized = torch._foreach_div(wide_grads, denominators.unbind())
            updates = decayed(normalized, weights, rule.weight_decay)
            sgd_(updates, weights, averages, _momentum(rule, rule.lr / first), skip)
    store([norms], [blended], skip)


def _momentum(rule: AdamRule, lr: Scalar) -> SGDRule:
    return SGDRule(
        lr=lr,
        momentum=rule.betas[0],
        dampening=rule.betas[0] if rule.averaged else 0.0,
        weight_decay=0.0,
        nesterov=False,
        decay_after_momentum=False,
    )
