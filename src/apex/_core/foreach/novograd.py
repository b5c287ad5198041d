"""NovoGrad over lists of tensors: Adam with one second moment per tensor.

Source: Ginsburg et al., arXiv:1905.11286.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from apex._core.foreach.gate import Gate, Scalar, bias_correction
from apex._core.foreach.norms import l2_norms, max_norms, stacked
from apex._core.foreach.working import store, working

MAX_NORM = 0
L2_NORM = 2


@dataclass(frozen=True)
class NovoGradRule:
    """The hyperparameters of one step.

    Attributes:
        lr: Learning rate.
        beta1: Decay of the average of gradients, per step.
        beta2: Decay of the average of their norms, per step.
        eps: Added to the denominator.
        weight_decay: Decay rate of the parameters.
        bias_correction: Whether to correct the bias of the averages.
        averaged: Whether the gradient's weight in its average is ``1 - beta1``; 1 if False.
        inside_moment: Whether the gradient is normalized and decayed before it is averaged.
        norm_type: 2 for the 2-norm, 0 for the largest absolute value.
    """

    lr: Scalar
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction: bool
    averaged: bool
    inside_moment: bool
    norm_type: int


def norms_of(grads: Sequence[Tensor], norm_type: int, device: torch.device) -> Tensor:
    """Returns the norm of every gradient: ``[N]`` fp32."""
    return stacked((max_norms if norm_type == MAX_NORM else l2_norms)(grads), device)


def blended(norms: Tensor, fresh: Tensor, rule: NovoGradRule) -> Tensor:
    """Returns the running norms ``[N]`` updated with this step's norms ``fresh``."""
    if rule.norm_type == MAX_NORM:
        return rule.beta2 * norms + (1.0 - rule.beta2) * fresh
    return torch.sqrt(rule.beta2 * norms * norms + (1.0 - rule.beta2) * fresh * fresh)


def novograd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    norms: Tensor,
    *,
    rule: NovoGradRule,
    step: Scalar,
    gate: Gate,
) -> None:
    """Takes one step in place; tensors of one device, any mix of floating dtypes.

    The running norms of the gradients include this step's: ``[N]`` fp32. Counts steps from 1.
    """
    if not params:
        return
    weights, gradients, averages = working(params, grads, exp_avgs)
    first, denominators = _divisors(norms, rule, step, gate)
    if rule.inside_moment:
        gradients = list(torch._foreach_div(gradients, denominators))
        gradients = _decayed(gradients, weights, rule)
    gradients = gate.gradients(gradients)
    torch._foreach_mul_(averages, gate.coefficient(rule.beta1, 1.0))
    torch._foreach_add_(averages, gradients, alpha=1.0 - rule.beta1 if rule.averaged else 1.0)
    updates = list(torch._foreach_div(averages, first))
    if not rule.inside_moment:
        torch._foreach_div_(updates, denominators)
        updates = _decayed(updates, weights, rule)
    gate.descend_(weights, updates, rule.lr)
    store(params, weights)
    store(exp_avgs, averages)


def _divisors(
    norms: Tensor, rule: NovoGradRule, step: Scalar, gate: Gate
) -> tuple[Scalar, list[Tensor]]:
    first: Scalar = 1.0
    second: Scalar = 1.0
    if rule.bias_correction:
        first = gate.coefficient(bias_correction(rule.beta1, step), 1.0)
        second = bias_correction(rule.beta2, step) ** 0.5
    denominators = norms / second + rule.eps
    (chosen,) = gate.select([torch.ones_like(denominators)], [denominators])
    return first, list(chosen.unbind())


def _decayed(values: list[Tensor], params: list[Tensor], rule: NovoGradRule) -> list[Tensor]:
    if not rule.weight_decay:
        return values
    return list(torch._foreach_add(values, params, alpha=rule.weight_decay))
