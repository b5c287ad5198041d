"""LAMB over lists of tensors: Adam's direction with a learning rate per tensor.

Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
ICLR 2020.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex._core.foreach.adam import AdamRule, directions_
from apex._core.foreach.gate import Gate, Scalar
from apex._core.foreach.norms import l2_norms, stacked
from apex._core.foreach.working import store, working


def clip_divisor(norm: Tensor, max_norm: Scalar) -> Tensor:
    """Returns the divisor that limits gradients of a global norm, 0-d, to ``max_norm``."""
    return torch.where(norm > max_norm, norm / max_norm, 1.0)


def lamb_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    rule: AdamRule,
    step: Scalar,
    divisor: Tensor,
    adaptive: bool,
    gate: Gate,
) -> None:
    """Takes one LAMB step in place; tensors of one device, any mix of floating dtypes.

    Divides the gradients by 0-d ``divisor``, but not in place. If ``adaptive``, each tensor's rate
    is scaled by its trust ratio. Counts steps from 1.
    """
    if not params:
        return
    weights, gradients, firsts, seconds = working(params, grads, exp_avgs, exp_avg_sqs)
    clipped = list(torch._foreach_div(gradients, divisor))
    updates = directions_(weights, clipped, firsts, seconds, rule=rule, step=step, gate=gate)
    if adaptive:
        device = params[0].device
        norms = stacked(l2_norms(weights), device), stacked(l2_norms(updates), device)
        torch._foreach_mul_(updates, list(trust_ratios(*norms).unbind()))
    gate.descend_(weights, updates, rule.lr)
    store(params, weights)
    store(exp_avgs, firsts)
    store(exp_avg_sqs, seconds)


def trust_ratios(param_norms: Tensor, update_norms: Tensor) -> Tensor:
    """Returns ``|param| / |update|`` per tensor, 1 where a norm is 0: ``[N]``."""
    both = (param_norms != 0) & (update_norms != 0)
    return torch.where(both, param_norms / update_norms, 1.0)
