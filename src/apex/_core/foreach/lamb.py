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
    rate = gate.coefficient(rule.lr, 0.0)
    if adaptive:
        device = params[0].device
        norms = stacked(l2_norms(weights), device), stacked(l2_norms(updates), device)
        apply_(weights, updates, trust_rates(*norms, rate))
    else:
        apply_(weights, updates, rate)
    for targets, values in ((params, weights), (exp_avgs, firsts), (exp_avg_sqs, seconds)):
        store(targets, values)


def trust_rates(param_norms: Tensor, update_norms: Tensor, lr: Scalar) -> Tensor:
    """Returns ``lr * |param| / |update|`` per tensor, ``lr`` where a norm is 0: ``[N]``."""
    both = (param_norms != 0) & (update_norms != 0)
    return torch.where(both, lr * (param_norms / update_norms), lr)


def apply_(params: list[Tensor], updates: list[Tensor], rates: Scalar) -> None:
    """Subtracts ``rates * updates`` in place; ``rates`` is a number, or ``[N]``, one per tensor."""
    if isinstance(rates, Tensor) and rates.dim() == 1:
        scaled = torch._foreach_mul(updates, list(rates.unbind()))
    else:
        scaled = torch._foreach_mul(updates, rates)
    torch._foreach_sub_(params, scaled)
