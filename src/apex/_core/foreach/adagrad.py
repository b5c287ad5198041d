"""Adagrad over lists of tensors.

Source: Duchi, Hazan and Singer, JMLR 2011.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from apex._core.foreach.gate import Gate, Scalar, add_
from apex._core.foreach.working import same_dtype, store, working
from apex._torch import foreach


@dataclass(frozen=True)
class AdagradRule:
    """The hyperparameters of one step.

    Attributes:
        lr: Learning rate.
        eps: Added to the denominator.
        weight_decay: Decay rate of the parameters.
        decoupled: Whether weight decay acts on the parameter directly, not on the gradient.
    """

    lr: Scalar
    eps: float
    weight_decay: float
    decoupled: bool


def adagrad_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    sums: Sequence[Tensor],
    *,
    rule: AdagradRule,
    gate: Gate,
) -> None:
    """Takes one step in place; tensors of one device, any mix of floating dtypes.

    Divides ``grads`` in place if the gate has a scale; ``sums`` are those of their squares.
    """
    if not params:
        return
    lists = working(params, grads, sums)
    if rule.decoupled and rule.weight_decay:
        # The order does not matter: the rest of the step does not read the parameter.
        keep = gate.coefficient(1.0 - rule.lr * rule.weight_decay, 1.0)
        torch._foreach_mul_(lists[0], keep)
    if foreach.has_fused("fused_adagrad_", params[0].device):
        _fused(lists, rule, gate)
    else:
        foreach_adagrad_(*lists, rule=rule, gate=gate)
    store(params, lists[0])
    store(sums, lists[2])
    if gate.grad_scale is not None:
        store(grads, lists[1])


def _coupled_decay(rule: AdagradRule) -> float:
    return 0.0 if rule.decoupled else rule.weight_decay


def _fused(lists: Sequence[list[Tensor]], rule: AdagradRule, gate: Gate) -> None:
    # The kernel uses the count only to decay lr, by a rate that is 0 here.
    count = torch.ones((), device=lists[0][0].device)
    for params, grads, sums in same_dtype(*lists):
        foreach.fused_adagrad_(
            params,
            grads,
            sums,
            [count] * len(params),
            lr=rule.lr,
            lr_decay=0.0,
            weight_decay=_coupled_decay(rule),
            eps=rule.eps,
            maximize=False,
            grad_scale=gate.grad_scale,
            found_inf=gate.skip,
        )


def foreach_adagrad_(
    params: list[Tensor],
    grads: list[Tensor],
    sums: list[Tensor],
    *,
    rule: AdagradRule,
    gate: Gate,
) -> None:
    """The same step, without decoupled decay, on foreach kernels."""
    gate.unscale_(grads)
    if _coupled_decay(rule):
        grads = list(torch._foreach_add(grads, params, alpha=rule.weight_decay))
    grads = gate.gradients(grads)
    torch._foreach_addcmul_(sums, grads, grads)
    denominators = list(torch._foreach_sqrt(sums))
    add_(denominators, gate.coefficient(rule.eps, 1.0))
    updates = list(torch._foreach_div(grads, denominators))
    torch._foreach_mul_(updates, gate.coefficient(rule.lr, 0.0))
    torch._foreach_sub_(params, updates)
