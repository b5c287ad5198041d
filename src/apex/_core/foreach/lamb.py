"""LAMB over lists of tensors: Adam's direction with a learning rate per tensor.

Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
ICLR 2020.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex._core.foreach.adam import AdamRule, directions_
from apex._core.foreach.norms import l2_norms, stacked
from apex._core.foreach.scalars import Scalar, descend_, descend_each_
from apex._core.foreach.working import working


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

    The arguments are those of :func:`apex._core.foreach.adam.adam_`. Divides the gradients by 0-d
    ``divisor``, but not in place. A tensor's rate is scaled by its trust ratio, without weight
    decay only with ``nvlamb``.
    """
    copies_skip, kernel_skip = skip, None
    if rule.is_fused(grads[0].device):
        copies_skip, kernel_skip = None, skip
    with working(grads, params, exp_avgs, exp_avg_sqs, skip=copies_skip) as wide:
        wide_grads, weights, *averages = wide
        clipped = list(torch._foreach_div(wide_grads, divisor))
        updates = directions_(clipped, weights, *averages, rule=rule, step=step, skip=kernel_skip)
        if nvlamb or rule.weight_decay != 0.0:
            device = weights[0].device
            param_norms = stacked(l2_norms(weights), device)
            update_norms = stacked(l2_norms(updates), device)
            rates = rule.lr * trust_ratios(param_norms, update_norms)
            descend_each_(weights, updates, rates, kernel_skip)
        else:
            descend_(weights, updates, rule.lr)  # by zeros in a skipped step


def trust_ratios(param_norms: Tensor, update_norms: Tensor) -> Tensor:
    """Returns ``|param| / |update|`` per tensor, 1 where a norm is 0: ``[N]``."""
    both = (param_norms != 0) & (update_norms != 0)
    return torch.where(both, param_norms / update_norms, 1.0)
