"""Adagrad over lists of tensors.

Source: Duchi, Hazan and Singer, JMLR 2011.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex._optimizer_rules.scalars import Scalar, decay_, decayed, descend_
from apex._optimizer_rules.working import working
from apex._torch import foreach
from apex._torch.copies import as_tensor


def adagrad_(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    sums: Sequence[Tensor],
    skip: Tensor | None = None,
    *,
    lr: Scalar,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """Takes one step in place; tensors of one device, any mix of floating dtypes.

    Args:
        grads: Gradients; at least one.
        params: Their parameters.
        sums: The sums of the gradients' squares.
        skip: 0-d flag, 1 to change nothing.
        lr: Learning rate.
        eps: Added to the denominator.
        weight_decay: Decay rate of the parameters.
        decoupled: Whether weight decay acts on the parameter instead of the gradient.
    """
    device = grads[0].device
    fused = foreach.fused_kernel("_fused_adagrad_", device)
    with working(grads, params, sums, skip=None if fused else skip) as (grads, params, sums):
        if decoupled:
            decay_(params, lr, weight_decay, skip)
            weight_decay = 0.0
        if fused:
            first_step = as_tensor(1.0, device)  # read for a decay of the rate, which is 0
            fused(
                params,
                grads,
                sums,
                [first_step] * len(params),
                lr=lr,
                lr_decay=0.0,
                weight_decay=weight_decay,
                eps=eps,
                maximize=False,
                grad_scale=None,
                found_inf=skip,
            )
            return
        updates = decayed(grads, params, weight_decay)
        torch._foreach_addcmul_(sums, updates, updates)
        denominators = torch._foreach_sqrt(sums)
        torch._foreach_add_(denominators, eps)
        descend_(params, torch._foreach_div(updates, denominators), lr)
