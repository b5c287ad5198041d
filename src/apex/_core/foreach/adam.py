"""Adam and AdamW over lists of tensors.

Sources: Kingma and Ba, ICLR 2015 (the rate of apex's first FusedAdam: the end of section 2);
Loshchilov and Hutter, ICLR 2019 (decoupled weight decay).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from apex._core.foreach.gate import Gate, Scalar, add_, as_tensor, bias_correction
from apex._core.foreach.working import same_dtype, store, working
from apex._torch import foreach

# The fused kernels always correct the averages' bias; at this count, the divisors are 1.
_UNBIASED_STEP = 2.0**60


@dataclass(frozen=True)
class AdamRule:
    """The hyperparameters of one Adam step.

    Attributes:
        lr: Learning rate.
        beta1: Decay of the average of gradients, per step.
        beta2: Decay of the average of their squares, per step.
        eps: Added to the denominator.
        weight_decay: Decay rate of the parameters.
        decoupled: Whether weight decay acts on the parameter (AdamW) or the gradient (Adam).
        bias_correction: Whether averages are divided by ``1 - beta ** step``.
        averaged: Whether the gradient's weight in its average is ``1 - beta1``; 1 if False.
        eps_inside_sqrt: Whether ``eps`` is added before the square root, as no fused kernel does.
    """

    lr: Scalar
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    bias_correction: bool = True
    averaged: bool = True
    eps_inside_sqrt: bool = False

    def corrections(self, step: Scalar, gate: Gate) -> tuple[Scalar, Scalar]:
        """Returns the divisors of both averages after ``step`` steps."""
        if not self.bias_correction:
            return 1.0, 1.0
        first, second = (bias_correction(beta, step) for beta in (self.beta1, self.beta2))
        return gate.coefficient(first, 1.0), gate.coefficient(second, 1.0)


def corrected_rate(lr: Scalar, betas: Sequence[float], step: Scalar) -> Scalar:
    """Returns the rate of apex's first FusedAdam: ``lr * sqrt(1 - beta2**t) / (1 - beta1**t)``.

    It corrects the bias in the step size, for a rule without ``bias_correction``, and so multiplies
    weight decay, too.
    """
    first, second = (bias_correction(beta, step) for beta in betas)
    return lr * second**0.5 / first


def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    rule: AdamRule,
    step: Scalar,
    gate: Gate,
) -> None:
    """Takes one Adam step in place; tensors of one device, any mix of floating dtypes.

    Counts steps from 1.
    """
    if not params:
        return
    lists = working(params, grads, exp_avgs, exp_avg_sqs)
    if foreach.has_fused("fused_adam_", params[0].device) and not rule.eps_inside_sqrt:
        _fused(lists, rule, step, gate)
    else:
        updates = directions_(*lists, rule=rule, step=step, gate=gate)
        gate.descend_(lists[0], updates, rule.lr)
    store(params, lists[0])
    store(exp_avgs, lists[2])
    store(exp_avg_sqs, lists[3])


def _fused(lists: Sequence[list[Tensor]], rule: AdamRule, step: Scalar, gate: Gate) -> None:
    kernel = foreach.fused_adamw_ if rule.decoupled else foreach.fused_adam_
    device = lists[0][0].device
    if not rule.bias_correction:
        step = _UNBIASED_STEP
    # One count serves all parameters: the kernel only reads it.
    count = as_tensor(step, device)
    for params, grads, exp_avgs, exp_avg_sqs in same_dtype(*lists):
        kernel(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [count] * len(params),
            lr=rule.lr,
            beta1=rule.beta1,
            beta2=rule.beta2,
            weight_decay=rule.weight_decay,
            eps=rule.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=gate.skip,
        )


def directions_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    rule: AdamRule,
    step: Scalar,
    gate: Gate,
) -> list[Tensor]:
    """Updates the averages and returns the directions that ``lr`` multiplies, as new tensors.

    A direction is ``m / (sqrt(v) + eps)`` with corrected averages, plus decoupled weight decay.
    """
    if rule.weight_decay and not rule.decoupled:
        grads = list(torch._foreach_add(grads, params, alpha=rule.weight_decay))
    grads = gate.gradients(grads)
    torch._foreach_mul_(exp_avgs, gate.coefficient(rule.beta1, 1.0))
    torch._foreach_add_(exp_avgs, grads, alpha=1.0 - rule.beta1 if rule.averaged else 1.0)
    torch._foreach_mul_(exp_avg_sqs, gate.coefficient(rule.beta2, 1.0))
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1.0 - rule.beta2)
    first, second = rule.corrections(step, gate)
    denominators = list(torch._foreach_div(exp_avg_sqs, second))
    eps = gate.coefficient(rule.eps, 1.0)
    if rule.eps_inside_sqrt:
        add_(denominators, eps)
    torch._foreach_sqrt_(denominators)
    if not rule.eps_inside_sqrt:
        add_(denominators, eps)
    updates = list(torch._foreach_div(exp_avgs, first))
    torch._foreach_div_(updates, denominators)
    if rule.weight_decay and rule.decoupled:
        torch._foreach_add_(updates, params, alpha=rule.weight_decay)
    return updates
