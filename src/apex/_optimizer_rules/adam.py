"""Adam and AdamW over lists of tensors.

Sources: Kingma and Ba, ICLR 2015 (the rate of apex's first FusedAdam: the end of section 2);
Loshchilov and Hutter, ICLR 2019 (decoupled weight decay).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from apex._optimizer_rules.scalars import (
    Scalar,
    Tensors,
    bias_correction,
    decayed,
    descend_,
)
from apex._optimizer_rules.working import working
from apex._torch import foreach
from apex._torch.copies import as_tensor

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

    def corrections(self, step: Scalar) -> list[Scalar]:
        """Returns the divisors of both averages after ``step`` steps."""
        if not self.bias_correction:
            return [1.0, 1.0]
        return [bias_correction(beta, step) for beta in self.betas]


def corrected_rate(lr: Scalar, betas: Sequence[float], step: Scalar) -> Scalar:
    """Returns the rate of apex's first FusedAdam: ``lr * sqrt(1 - beta2**t) / (1 - beta1**t)``.

    The rate contains the bias correction, so the rule has no ``bias_correction``. Therefore the
    correction also multiplies weight decay.
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
    device = grads[0].device
    name = "_fused_adamw_" if rule.decoupled else "_fused_adam_"
    fused = foreach.fused_kernel(name, device)
    if rule.eps_inside_sqrt or not rule.averaged:
        fused = None
    with working(grads, params, exp_avgs, exp_avg_sqs, skip=None if fused else skip) as wide:
        grads, params, exp_avgs, exp_avg_sqs = wide
        if fused:
            # One count serves all parameters: the kernel only reads it.
            count = as_tensor(step if rule.bias_correction else _UNBIASED_STEP, device)
            fused(
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
            return
        if not rule.decoupled:
            grads = decayed(grads, params, rule.weight_decay)
        torch._foreach_mul_(exp_avgs, rule.betas[0])
        torch._foreach_add_(exp_avgs, grads, alpha=1.0 - rule.betas[0] if rule.averaged else 1.0)
        torch._foreach_mul_(exp_avg_sqs, rule.betas[1])
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1.0 - rule.betas[1])
        first, second = rule.corrections(step)
        denominators = torch._foreach_div(exp_avg_sqs, second)
        if rule.eps_inside_sqrt:
            torch._foreach_add_(denominators, rule.eps)
        torch._foreach_sqrt_(denominators)
        if not rule.eps_inside_sqrt:
            torch._foreach_add_(denominators, rule.eps)
        updates: Tensors = torch._foreach_div(exp_avgs, first)
        torch._foreach_div_(updates, denominators)
        if rule.decoupled:
            updates = decayed(updates, params, rule.weight_decay)
        descend_(params, updates, rule.lr)
