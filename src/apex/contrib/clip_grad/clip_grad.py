"""Gradient clipping by the global norm, computed in fp32 or wider."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from apex._core import arguments
from apex._core.foreach.norms import global_norm


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales gradients in place so that their global norm is at most ``max_norm``.

    Unlike ``torch.nn.utils.clip_grad_norm_``, it computes the norm of 16-bit gradients in fp32, so
    that the norm of finite gradients does not overflow.

    Args:
        parameters: Parameters; those without a gradient are ignored.
        max_norm: Largest allowed norm.
        norm_type: The p of the p-norm; ``inf`` for the largest absolute value.
        error_if_nonfinite: Whether to raise if the norm is inf or NaN; requires a host sync.
        foreach: Ignored; torch uses foreach kernels on devices that have them.

    Returns:
        The norm before clipping, 0-d; 0 without gradients.

    Raises:
        RuntimeError: If ``error_if_nonfinite`` is set and the norm is not finite.
        TypeError: If a gradient is sparse, a norm is not a number, or ``parameters`` is a module.
        ValueError: If ``max_norm`` or ``norm_type`` is negative or NaN.
    """
    arguments.parameters("clip_grad_norm_", parameters)
    max_norm, norm_type = arguments.clipping("clip_grad_norm_", max_norm, norm_type)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [param.grad.detach() for param in parameters if param.grad is not None]
    if any(grad.layout is not torch.strided for grad in grads):
        raise TypeError("clip_grad_norm_ takes dense gradients; it got a sparse one.")
    norm = global_norm(grads, norm_type)
    # sync: only the host can raise the error that the caller asks for
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"The norm of order {norm_type} of the gradients is not finite, so they cannot be "
            "clipped. Pass error_if_nonfinite=False to scale them by it anyway."
        )
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
