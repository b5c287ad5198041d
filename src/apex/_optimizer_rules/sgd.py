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
from apex._optimizer_rules.scalars import Scalar, Tensors, decayed, descend_
from apex._optimizer_rules.working import store, working
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
    decays_late = rule.decay_after_momentum
    fused = foreach.fused_kernel("_fused_sgd_", grads[0].device)
    if (decays_late and rule.weight_decay) or any(map(is_low_precision, buffers)):
        fused = None
    if buffers and not rule.momentum:  # torch's kernel takes none; NovoGrad's beta may be 0
        fused = None
    changed = [params, buffers] if buffers else [params]
    with working(grads, *changed, skip=None if fused else skip) as (grads, params, *momenta):
        wide_buffers = momenta[0] if momenta else []
        if fused:
            fused(
                params,
                grads,
                wide_buffers,
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
            return
        updates: Tensors = grads if decays_late else decayed(grads, params, rule.weight_decay)
        if momenta:
            if first_run:
                foreach.copy_(wide_buffers, updates)
            else:
                torch._foreach_mul_(wide_buffers, rule.momentum)
                torch._foreach_add_(wide_buffers, updates, alpha=1.0 - rule.dampening)
            # As stored: see Note [16-bit momentum].
            rounded = [wide.to(own.dtype) for wide, own in zip(wide_buffers, buffers, strict=True)]
            store(wide_buffers, rounded)
            if rule.nesterov:
                updates = torch._foreach_add(updates, wide_buffers, alpha=rule.momentum)
            else:
                updates = wide_buffers
        if decays_late:
            updates = decayed(updates, params, rule.weight_decay)
        descend_(params, updates, rule.lr)
