"""Adam as in apex's first FusedAdam, which corrects the bias in the step size.

Source: Kingma and Ba, ICLR 2015, the form at the end of section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from apex._core.foreach.gate import Gate, Scalar, add_, bias_correction
from apex._core.foreach.working import store, working


@dataclass(frozen=True)
class EarlyAdamRule:
    """The hyperparameters of one step.

    Attributes:
        lr: Learning rate, which also multiplies the weight decay.
        beta1: Decay of the average of gradients, per step.
        beta2: Decay of the average of their squares, per step.
        eps: Added to the denominator.
        eps_inside_sqrt: Whether ``eps`` is added before the square root.
        weight_decay: Decay rate of the parameters, decoupled.
        bias_correction: Whether ``lr`` is multiplied by ``sqrt(1 - beta2**t) / (1 - beta1**t)``.
    """

    lr: Scalar
    beta1: float
    beta2: float
    eps: float
    eps_inside_sqrt: bool
    weight_decay: float
    bias_correction: bool

    def size(self, step: Scalar) -> Scalar:
        """Returns the step size after ``step`` steps."""
        if not self.bias_correction:
            return self.lr
        first, second = (bias_correction(beta, step) for beta in (self.beta1, self.beta2))
        return self.lr * second**0.5 / first

    def denominators(self, squares: list[Tensor], gate: Gate) -> list[Tensor]:
        """Returns the divisors of the averages, as new tensors."""
        added = gate.coefficient(self.eps, 1.0)
        if self.eps_inside_sqrt:
            result = list(torch._foreach_mul(squares, 1.0))  # copies: _foreach_clone came with 2.11
            add_(result, added)
            torch._foreach_sqrt_(result)
        else:
            result = list(torch._foreach_sqrt(squares))
            add_(result, added)
        return result


def early_adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    rule: EarlyAdamRule,
    step: Scalar,
    gate: Gate,
) -> None:
    """Takes one step in place; tensors of one device, any mix of floating dtypes.

    Args:
        params: Parameters.
        grads: Gradients; not modified.
        exp_avgs: Averages of gradients.
        exp_avg_sqs: Averages of their squares.
        rule: Hyperparameters.
        step: Count of this step, from 1.
        gate: Whether to skip the step.
    """
    values, wide, firsts, seconds = working(params, grads, exp_avgs, exp_avg_sqs)
    wide = gate.gradients(wide)
    torch._foreach_mul_(firsts, gate.coefficient(rule.beta1, 1.0))
    torch._foreach_add_(firsts, wide, alpha=1.0 - rule.beta1)
    torch._foreach_mul_(seconds, gate.coefficient(rule.beta2, 1.0))
    torch._foreach_addcmul_(seconds, wide, wide, value=1.0 - rule.beta2)
    updates = list(torch._foreach_div(firsts, rule.denominators(seconds, gate)))
    if rule.weight_decay:
        torch._foreach_add_(updates, values, alpha=rule.weight_decay)
    torch._foreach_mul_(updates, gate.coefficient(rule.size(step), 0.0))
    torch._foreach_sub_(values, updates)
    for targets, results in zip(
        (params, exp_avgs, exp_avg_sqs), (values, firsts, seconds), strict=True
    ):
        store(targets, results)
