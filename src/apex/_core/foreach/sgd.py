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
from apex._core.foreach.scalars import Scalar, Tensors, decayed, descend_
from apex._core.foreach.working import store, working
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
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    decay_after_momentum: bool


def sgd_(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    buffers: Sequence[Tensor],
    rule: SGDRule,
    skip: Tensor | None = None,
    *,
    first_run: bool = False,
) -> None:
    """Takes one step in place; tensors of one device, any mix of floating dtypes.

    Args:
        grads: Gradients; at least one.
        params: Their parameters.
        buffers: Their momentum; empty without.
        rule: The hyperparameters.
        skip: 0-d flag, 1 to change nothing.
        first_run: Whether buffers become the undamped gradients.
    """
    decays_late = rule.decay_after_momentum and rule.weight_decay
    has_kernel = foreach.has_fused("fused_sgd_", grads[0].device)
    fused = has_kernel and not decays_late and not any(map(is_low_precision, buffers))
    stored = [buffer.dtype for buffer in buffers]
    changed = [params, buffers] if buffers else [params]
    with working(grads, *changed, skip=None if fused else skip) as (grads, params, *momenta):
        buffers = momenta[0] if momenta else []
        if not fused:
            _plain(grads, params, buffers, rule=rule, first_run=first_run, stored=stored)
            return
        foreach.fused_sgd_(
            params,
            grads,
            buffers,
            weight_decay=rule.weight_decay,
            momentum=rule.momentum,
            lr=rule.lr,
            dampening=rule.dampening,
            nesterov=rule.nesterov,
            maximize=False,
            is_first_step=first_run,
            grad_scale=None,
            found_inf=skip,
        )


def _plain(
    grads: Tensors,
    params: Tensors,
    buffers: Tensors,
    *,
    rule: SGDRule,
    first_run: bool,
    stored: Sequence[torch.dtype],
) -> None:
    """The same step on foreach kernels; ``stored`` are the dtypes that buffers are kept in."""
    decays_late = rule.decay_after_momentum
    updates = grads if decays_late else decayed(grads, params, rule.weight_decay)
    if buffers:
        if first_run:
            foreach.copy_(buffers, updates)
        else:
            torch._foreach_mul_(buffers, rule.momentum)
            torch._foreach_add_(buffers, updates, alpha=1.0 - rule.dampening)
        store(buffers, [buffer.to(dtype) for buffer, dtype in zip(buffers, stored, strict=True)])
        if rule.nesterov:
            updates = torch._foreach_add(updates, buffers, alpha=rule.momentum)
        else:
            updates = buffers
    if decays_late:
        updates = decayed(updates, params, rule.weight_decay)
    descend_(params, updates, rule.lr)
