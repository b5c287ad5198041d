"""LAMB over lists of tensors: Adam's direction with a learning rate per tensor.

Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
ICLR 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from apex._core.foreach.norms import norms_of
from apex._optimizer_rules.adam import AdamRule, adam_
from apex._optimizer_rules.scalars import Scalar, Tensors, decayed, descend_, descend_each_
from apex._optimizer_rules.working import working


def clip_divisor(norm: Tensor, max_norm: Scalar) -> Tensor:
    """Returns the divisor that limits gradients of a global norm, 0-d, to ``max_norm``."""
    return torch.where(norm > max_norm, norm / max_norm, 1.0)


def lamb_(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    rule: AdamRule,
    step: Scalar,
    skip: Tensor | None = None,
    *,
    divisor: Tensor,
    nvlamb: bool,
) -> None:
    """Takes one LAMB step in place; tensors of one device, any mix of floating dtypes.

    Takes the arguments of :func:`apex._optimizer_rules.adam.adam_`. Divides the gradients by 0-d
    ``divisor``, but not in place. A tensor's rate is scaled by its trust ratio, without weight
    decay only with ``nvlamb``.
    """
    with working(grads, params, exp_avgs, exp_avg_sqs) as (wide_grads, weights, *averages):
        clipped = torch._foreach_div(wide_grads, divisor)
        updates = directions(clipped, weights, *averages, rule=rule, step=step, skip=skip)
        if nvlamb or rule.weight_decay != 0.0:
            device = weights[0].device
            weight_norms = norms_of(weights, 2.0, device)
            ratios = trust_ratios(weight_norms, norms_of(updates, 2.0, device))
            descend_each_(weights, updates, rule.lr * ratios, skip)
        else:
            descend_(weights, updates, rule.lr)  # by zeros in a skipped step


def directions(
    grads: Tensors,
    params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    rule: AdamRule,
    step: Scalar,
    skip: Tensor | None = None,
) -> Tensors:
    """Updates the averages and returns the directions that ``lr`` multiplies, as new tensors.

    A direction is ``m / (sqrt(v) + eps)`` with corrected averages, plus decoupled weight decay.
    Where 0-d ``skip`` is set, the averages stay, and the directions contain only weight decay.
    """
    if not rule.decoupled:
        grads = decayed(grads, params, rule.weight_decay)
    # Adam steps from 0 at a rate of -1: on a GPU one launch, where plain operators take eight.
    updates: Tensors = [torch.empty_like(param) for param in params]
    torch._foreach_zero_(updates)
    undecayed = replace(rule, lr=-1.0, weight_decay=0.0)
    adam_(grads, updates, exp_avgs, exp_avg_sqs, undecayed, step, skip)
    return decayed(updates, params, rule.weight_decay) if rule.decoupled else updates


def trust_ratios(param_norms: Tensor, update_norms: Tensor) -> Tensor:
    """Returns ``|param| / |update|`` per tensor, 1 where a norm is 0: ``[N]``."""
    both = (param_norms != 0) & (update_norms != 0)
    return torch.where(both, param_norms / update_norms, 1.0)
