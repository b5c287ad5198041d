"""Clipping by the global norm of everything that an optimizer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from apex._core.finite import group
from apex._core.foreach import norms
from apex._engine import masters
from apex._torch import dtensor, parameters
from apex._torch.copies import moved
from apex._torch.dynamo import untraced

if TYPE_CHECKING:
    from apex._engine.optimizer.prepared import PreparedOptimizer


@untraced
@torch.no_grad()
def clip_grad_norm_(
    prepared: PreparedOptimizer, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
) -> Tensor:
    """Scales an optimizer's gradients so that their norm is at most ``max_norm``; returns the norm.

    Gradients that wait on the model stay there: the factor is applied when they are taken.
    """
    if prepared.open_pass is not None:
        raise RuntimeError(
            "amp.clip_grad_norm_ was called while the gradients are still scaled. Call it after "
            "the amp.scale_loss block; with delay_unscale=True, after the last block of the step."
        )
    prepared.adopt_new()
    masters.take(
        pair
        for pair in prepared.pairs
        if pair.factor is not None or parameters.grad_of(pair.master) is not None
    )
    params = {id(param): param for param in prepared.params()}.values()
    own = [param for param in params if parameters.grad_of(param) is not None]
    grads = [grad for param in own if (grad := param.grad) is not None]
    waiting = [pair for pair in prepared.pairs if pair.waiting is not None]
    low = [grad for pair in waiting if (grad := pair.waiting) is not None]
    if any(grad.layout is not torch.strided for grad in (*low, *grads)):
        raise TypeError(
            "amp.clip_grad_norm_ got a sparse gradient, which has no norm that torch can compute. "
            "Use an embedding with sparse=False, or give it an optimizer of its own."
        )
    if dtensor.any_dtensor(own):
        total = nn.utils.clip_grad_norm_(own, max_norm, norm_type, error_if_nonfinite)
        return total.full_tensor() if dtensor.is_dtensor(total) else total
    if not (low or grads):
        return torch.zeros((), dtype=torch.float32, device="cpu")
    norm = norms.global_norm([*low, *grads], norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):  # sync: the host must raise
        raise RuntimeError(
            f"The norm of order {norm_type} of the gradients is not finite, so they cannot be "
            "clipped. Pass error_if_nonfinite=False to scale them by it anyway: a dynamic loss "
            "scale then skips the step."
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for pair in waiting:
        pair.factor = factor
    for same in group(grads) if grads else ():
        torch._foreach_mul_(same, moved(factor, same[0].device, same[0].dtype))
    return norm
