"""Stochastic gradient descent with momentum over lists of tensors.

Note [16-bit momentum]
Momentum that is stored in 16 bits is rounded first, and the parameter steps by what is stored, as
in torch. The fused kernels step by the unrounded value and end elsewhere: after seven steps from
[0, 1) at a rate of 0.25, 3e-3 from torch's fp16 parameters (apex's own test allows 1e-3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    Momentum ``buffers`` are empty without momentum; the first run sets them to the undamped
    gradients.
    """
    if not params:
        return
    buffers = buffers if rule.momentum else ()
    lists = working(params, grads, *((buffers,) if buffers else ()))
    fused = foreach.has_fused("fused_sgd_", params[0].device)
    late_decay = rule.decay_after_momentum and rule.weight_decay
    if fused and not late_decay and not any(map(is_low_precision, buffers)):
        _fused(lists, rule, first_run, gate)
    else:
        _foreach(*lists, rule=rule, first_run=first_run, gate=gate, stored=buffers)
    store(params, lists[0])
    if buffers:
        store(buffers, lists[2])


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
            grad_scale=None,
            found_inf=gate.skip,
        )


def _foreach(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: Sequence[Tensor] = (),
    *,
    rule: SGDRule,
    first_run: bool,
    gate: Gate,
    stored: Sequence[Tensor],
) -> None:
    """The same step on foreach kernels; ``stored`` are the buffers in the dtype they are kept."""
    updates = grads
    if rule.weight_decay and not rule.decay_after_momentum:
        updates = list(torch._foreach_add(updates, params, alpha=rule.weight_decay))
    updates = gate.gradients(updates)
    if buffers:
        buffers = list(buffers)
        if first_run:
            torch._foreach_copy_(buffers, gate.select(buffers, updates))
        else:
            torch._foreach_mul_(buffers, gate.coefficient(rule.momentum, 1.0))
            torch._foreach_add_(buffers, updates, alpha=1.0 - rule.dampening)
        store(stored, buffers)
        store(buffers, stored)
        ahead = torch._foreach_add(updates, buffers, alpha=rule.momentum) if rule.nesterov else ()
        updates = list(ahead or buffers)
    if rule.weight_decay and rule.decay_after_momentum:
        updates = list(torch._foreach_add(updates, params, alpha=rule.weight_decay))
    gate.descend_(params, updates, rule.lr)
