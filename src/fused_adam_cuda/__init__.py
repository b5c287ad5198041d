"""apex's ``fused_adam_cuda``: one Adam step on one tensor, on every device, in any floating dtype.

Projects that define their own FusedAdam call it, such as OpenNMT-py 1.x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex._optimizer_rules.adam import AdamRule, adam_, corrected_rate

__all__ = ["adam"]


@torch.no_grad()
def adam(
    p: Tensor,
    out_p: Tensor,
    m: Tensor,
    v: Tensor,
    g: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    scale: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Takes one step in place, computed in fp32 (fp64 for fp64 tensors) and rounded once.

    ``m`` and ``v`` are the averages of the gradients and of their squares. ``out_p`` receives the
    new parameter in its own dtype; pass an empty tensor to skip this. The gradient is ``g`` divided
    by ``scale``; ``g`` itself does not change. ``step`` counts from 1. ``mode`` 0 adds ``eps``
    inside the square root, and 1 outside. ``bias_correction`` 1 corrects the step size. Weight
    decay is decoupled and multiplied by ``lr``.

    Raises:
        ValueError: If ``mode`` is neither 0 nor 1.
    """
    if mode not in (0, 1):
        raise ValueError(f"mode is {mode!r}; it must be 0 (eps inside the root) or 1 (outside).")
    grad = g.view_as(p).to(torch.promote_types(g.dtype, torch.float32)) / scale
    rule = AdamRule(
        lr=corrected_rate(lr, (beta1, beta2), step) if bias_correction else lr,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        decoupled=True,
        bias_correction=False,
        eps_inside_sqrt=mode == 0,
    )
    adam_([grad], [p], [m.view_as(p)], [v.view_as(p)], rule, step)
    if out_p.numel():
        out_p.copy_(p.view_as(out_p))
