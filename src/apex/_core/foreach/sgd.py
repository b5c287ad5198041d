"""Stochastic gradient descent with momentum over lists of tensors.

Note [16-bit momentum]
Momentum that is stored in 16 bits is rounded first, and the parameter steps by what is stored, as
in torch. The fused kernels step by the unrounded value and end elsewhere: after seven steps from
[0, 1) at a rate of 0.25, 3e-3 from torch's fp16 parameters (apex's own test allows 1e-3). They take
the first step, where the momentum is the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from apex._core.dtypes import is_low_precision
from apex._core.foreach.gate import Gate, Scalar
from apex._core.foreach.working import same_dtype, store, working
from apex._torch import foreach


@dataclass(frozen=True)
class SGDRule:
    """The hyperparameters of one step.

    Attributes:
        lr: Learning rate.
        momentum: Decay of the momentum buffer per step; 0 for none.
        dampening: Fraction of the gradient that the buffer does not take.
        weight_decay: Decay rate of the parameters.
        nesterov: Whether to use Nesterov momentum.
        decay_after_momentum: Whether weight decay is added after momentum instead of before.
    """

    lr: Scalar
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    decay_after_momentum: bool = False


def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    *,
    rule: SGDRule,
    first_run: bool,
    gate: Gate,
) -> None:
    """Takes one step in place; tensors of one device, any mix of floating dtypes.

    Divides ``grads`` in place if the gate has a scale. Momentum ``buffers`` are empty without
    momentum; the first run sets them to the undamped gradients.
    """
    if not params:
        return
    later = rule.momentum and not first_run
    rounds = [is_low_precision(buffer) for buffer in buffers] if later else []
    if any(rounds) and not all(rounds):
        for chosen in (rounds, [not each for each in rounds]):
            parts = (list(compress(tensors, chosen)) for tensors in (params, grads, buffers))
            sgd_(*parts, rule=rule, first_run=first_run, gate=gate)
        return
    lists = working(params, grads, *((buffers,) if rule.momentum else ()))
    fused = foreach.has_fused("fused_sgd_", params[0].device) and not any(rounds)
    if fused and not (rule.decay_after_momentum and rule.weight_decay):
        _fused(lists, rule, first_run, gate)
        if rule.momentum:
            store(buffers, lists[2])
    else:
        momenta = lists[2] if rule.momentum else []
        foreach_sgd_(
            lists[0], lists[1], momenta, rule=rule, first_run=first_run, gate=gate, stored=buffers
        )
    store(params, lists[0])
    if gate.grad_scale is not None:
        store(grads, lists[1])


def _fused(lists: Sequence[list[Tensor]], rule: SGDRule, first_run: bool, gate: Gate) -> None:
    for params, grads, *buffers in same_dtype(*lists):
        foreach.fused_sgd_(
            params,
            grads,
            buffers[0] if buffers else [],
            weight_decay=rule.weight_decay,
            momentum=rule.momentum,
            lr=rule.lr,
            dampening=rule.dampening,
            nesterov=rule.nesterov,
            maximize=False,
            is_first_step=first_run,
            grad_scale=gate.grad_scale,
            found_inf=gate.skip,
        )


def foreach_sgd_(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    *,
    rule: SGDRule,
    first_run: bool,
    gate: Gate,
    stored: Sequence[Tensor] = (),
) -> None:
    """The same step on foreach kernels; ``stored`` are the buffers in the dtype they are kept."""
    gate.unscale_(grads)
    updates = grads
    if rule.weight_decay and not rule.decay_after_momentum:
        updates = list(torch._foreach_add(updates, params, alpha=rule.weight_decay))
    updates = gate.gradients(updates)
    if rule.momentum:
        if first_run:
            torch._foreach_copy_(buffers, gate.select(buffers, updates))
        else:
            torch._foreach_mul_(buffers, gate.coefficient(rule.momentum, 1.0))
            torch._foreach_add_(buffers, updates, alpha=1.0 - rule.dampening)
        if stored:
            store(stored, buffers)
            store(buffers, stored)
        ahead = rule.nesterov
        updates = (
            list(torch._foreach_add(updates, buffers, alpha=rule.momentum)) if ahead else buffers
        )
    if rule.weight_decay and rule.decay_after_momentum:
        updates = list(torch._foreach_add(updates, params, alpha=rule.weight_decay))
    rate = gate.coefficient(rule.lr, 0.0)
    if isinstance(rate, Tensor):
        torch._foreach_sub_(params, torch._foreach_mul(updates, rate))
    else:
        torch._foreach_add_(params, updates, alpha=-rate)  # allocates nothing
