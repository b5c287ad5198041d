"""The gradients of layer norm and RMS norm, in one formula."""

from __future__ import annotations

from torch import Tensor


def norm_gradients(
    grad: Tensor,
    y: Tensor,
    factor: Tensor,
    weight: Tensor | None,
    dims: tuple[int, ...],
    *,
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of the input, of the weight and of the bias, the last two unsummed.

    With ``g`` the gradient that reaches ``y``, that of the input is
    ``(g - y * mean(g * y)) * factor``, less its mean where the input is centered.

    Args:
        grad: Gradient of the result, ``[*, shape]``.
        y: Input over its deviation, ``[*, shape]``.
        factor: One over the deviation, of size 1 in ``dims``.
        weight: ``[shape]``; None means ones.
        dims: The dimensions of ``shape``, counted from the end.
        centered: Whether the norm subtracts the mean.
    """
    inner = grad if weight is None else grad * weight
    of_x = inner - y * (inner * y).mean(dims, keepdim=True)
    if centered:
        of_x = of_x - inner.mean(dims, keepdim=True)
    return of_x * factor, grad * y, grad
