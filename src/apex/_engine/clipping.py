"""Clipping by the global norm of everything that an optimizer steps."""

from __future__ import annotations

import torch
from torch import Tensor

from apex._core.foreach import norms
from apex._engine.optimizer.prepared import PreparedOptimizer
from apex._torch import dtensor, parameters
from apex._torch.copies import moved
from apex._torch.dynamo import untraced
from apex._torch.foreach import group


@untraced
@torch.no_grad()
def clip_grad_norm_(
    prepared: PreparedOptimizer, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
) -> Tensor:
    """Scales an optimizer's gradients so that their norm is at most ``max_norm``; returns the norm.

    Gradients of a 16-bit model stay in 16 bits.
    """
    opened = prepared.unfinished_pass
    if opened is not None and (opened.is_open or opened.scaled):
        raise RuntimeError(
            "amp.clip_grad_norm_ was called while the gradients are still scaled or incomplete. "
            "Call it after the amp.scale_loss block, or under DistributedDataParallel after those "
            "of all losses of the forward pass."
        )
    params = dict.fromkeys(prepared.trained_params())
    grads = [grad for grad in map(parameters.grad_of, params) if grad is not None]
    if any(grad.layout is not torch.strided for grad in grads):
        raise TypeError(
            "amp.clip_grad_norm_ got a sparse gradient, which has no norm that torch can compute. "
            "Use an embedding with sparse=False, or give it an optimizer of its own."
        )
    norm = norms.global_norm(grads, norm_type)
    if dtensor.is_dtensor(norm):
        norm = norm.full_tensor()
    if error_if_nonfinite and not bool(norm.isfinite()):  # sync: the host must raise
        raise RuntimeError(
            f"The norm of order {norm_type} of the gradients is not finite, so they cannot be "
            "clipped. Pass error_if_nonfinite=False to scale them by it anyway: a dynamic loss "
            "scale then skips the step."
        )
    max_norm = max(max_norm, torch.finfo(torch.float32).tiny)
    # (norm + 1e-6) / max_norm, at least 1. torch multiplies by the inverse, in two kernels more.
    divisor = torch.rsub(norm, 1e-6 / max_norm, alpha=-1.0 / max_norm).clamp_(min=1.0)
    _divide_(dtensor.dense_values(grads), divisor)
    return norm


def _divide_(grads: list[Tensor], divisor: Tensor) -> None:
    for same in group(grads):
        first = same[0]
        factor = torch.empty((), dtype=first.dtype, device=first.device)
        # One kernel, with the cast. fp16 holds the factor, unlike large divisors.
        torch.reciprocal(moved(divisor, first.device), out=factor)
        torch._foreach_mul_(same, factor)
