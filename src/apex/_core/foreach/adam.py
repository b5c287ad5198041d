"""Adam and AdamW over lists of tensors.

Sources: Kingma and Ba, ICLR 2015 (the rate of apex's first FusedAdam: the end of section 2);
Loshchilov and Hutter, ICLR 2019 (decoupled weight decay).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from apex._core.foreach.scalars import Scalar, as_tensor, bias_correction, descend_
from apex._core.foreach.working import working
from apex._torch import foreach

# The fused kernels always correct the averages' bias; at this count, the divisors are 1.
_UNBIASED_STEP = 2.0**60


@dataclass(frozen=True)
class AdamRule:
    """The hyperparameters of one step of Adam, LAMB or NovoGrad.

    Attributes:
        lr: Learning rate.
        betas: Decay of the averages of gradients and of their squares (or norms), per step.
        eps: Added to the denominator.
        weight_decay: Decay rate of the parameters.
        decoupled: Whether weight decay acts on the parameter (AdamW) or the gradient (Adam).
        bias_correction: Whether averages are divided by ``1 - beta ** step``.
        averaged: Whether the gradient's weight in its average is ``1 - betas[0]``; 1 if False.
        eps_inside_sqrt: Whether ``eps`` is added before the square root, as no fused kernel does.
    """

    lr: Scalar
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    bias_correction: bool = True
    averaged: bool = True
    eps_inside_sqrt: bool = False

    def is_fused(self, device: torch.device) -> bool:
        """Returns whether torch's fused kernel on ``device`` computes the rule."""
        fits = self.averaged and not self.eps_inside_sqrt
        return fits and foreach.has_fused("fused_adam_", device)

    def corrections(self, step: Scalar) -> list[Scalar]:
        """Returns the divisors of both averages after ``step`` steps."""
        if not self.bias_correction:
            return [1.0, 1.0]
        return [bias_correction(beta, step) for beta in self.betas]

    def decayed(self, values: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        """Returns gradients or updates with weight decay added."""
        if not self.weight_decay:
            return values
        return list(torch._foreach_add(values, params, alpha=self.weight_decay))


def corrected_rate(lr: Scalar, betas: Sequence[float], step: Scalar) -> Scalar:
    """Returns the rate of apex's first FusedAdam: ``lr * sqrt(1 - beta2**t) / (1 - beta1**t)``.

    It corrects the bias in the step size, for a rule without ``bias_correction``, and so multiplies
    weight decay, too.
    """
    first, second = (bias_correction(beta, step) for beta in betas)
    return lr * second**0.5 / first


def adam_(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    rule: AdamRule,
    step: Scalar,
    skip: Tensor | None = None,
) -> None:
    """Takes one Adam step in place; tensors of one device, any mix of floating dtypes.

    Args:
        grads: Gradients; at least one.
        params: Their parameters.
        exp_avgs: The averages of the gradients.
        exp_avg_sqs: The averages of their squares.
        rule: The hyperparameters.
        step: Count of this step, from 1.
        skip: 0-d flag, 1 to change nothing.
    """
    fused = rule.is_fused(grads[0].device)
    with working(grads, params, exp_avgs, exp_avg_sqs, skip=None if fused else skip) as wide:
        if fused:
            _run_kernel(*wide, rule=rule, step=step, skip=skip)
        else:
            descend_(wide[1], directions_(*wide, rule=rule, step=step), rule.lr)


def directions_(
    grads: list[Tensor],
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    rule: AdamRule,
    step: Scalar,
    skip: Tensor | None = None,
) -> list[Tensor]:
    """Updates the averages and returns the directions that ``lr`` multiplies, as new tensors.

    A direction is ``m / (sqrt(v) + eps)`` with corrected averages, plus decoupled weight decay.
    Only a rule that ``is_fused`` takes a ``skip``, 0-d: where it is set, the averages stay, and the
    directions hold weight decay alone.
    """
    if not rule.decoupled:
        grads = rule.decayed(grads, params)
    if rule.is_fused(grads[0].device):
        # The kernel steps from 0 at a rate of -1: one launch, where plain operators take eight.
        updates = [torch.empty_like(param) for param in params]
        torch._foreach_zero_(updates)
        plain_rule = replace(rule, lr=-1.0, weight_decay=0.0)
        _run_kernel(grads, updates, exp_avgs, exp_avg_sqs, rule=plain_rule, step=step, skip=skip)
    else:
        torch._foreach_mul_(exp_avgs, rule.betas[0])
        torch._foreach_add_(exp_avgs, grads, alpha=1.0 - rule.betas[0] if rule.averaged else 1.0)
        torch._foreach_mul_(exp_avg_sqs, rule.betas[1])
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1.0 - rule.betas[1])
        first, second = rule.corrections(step)
        denominators = list(torch._foreach_div(exp_avg_sqs, second))
        if rule.eps_inside_sqrt:
            torch._foreach_add_(denominators, rule.eps)
        torch._foreach_sqrt_(denominators)
        if not rule.eps_inside_sqrt:
            torch._foreach_add_(denominators, rule.eps)
        updates = list(torch._foreach_div(exp_avgs, first))
        torch._foreach_div_(updates, denominators)
    return rule.decayed(updates, params) if rule.decoupled else updates


def _run_kernel(*lists: list[Tensor], rule: AdamRule, step: Scalar, skip: Tensor | None) -> None:
    # One count serves all parameters: the kernel only reads it.
    count = as_tensor(step if rule.bias_correction else _UNBIASED_STEP, lists[0][0].device)
    kernel: Any = foreach.fused_adamw_ if rule.decoupled else foreach.fused_adam_
    for (grads, params, exp_avgs, exp_avg_sqs), _ in foreach.group([*lists]).values():
        kernel(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [count] * len(params),
            lr=rule.lr,
            beta1=rule.betas[0],
            beta2=rule.betas[1],
            weight_decay=rule.weight_decay,
            eps=rule.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=skip,
        )
