"""The gradients of layer norm and RMS norm, in one formula."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def norm_gradients(
    grad: Tensor,
    y: Tensor,
    factor: Tensor,
    weight: Tensor | None,
    dims: tuple[int, ...],
    *,
    centered: bool,
    like: Sequence[Tensor],
) -> list[Tensor]:
    """Returns the gradients of ``like``: the input, and where given, weight and bias.

    With ``g`` the gradient that reaches ``y``, that of the input is
    ``(g - y * mean(g * y)) * factor``, less its mean where the input is centered.

    Args:
        grad: Gradient of the result, ``[*, shape]``.
        y: Input over its deviation, ``[*, shape]``.
        factor: One over the deviation, of size 1 in ``dims``.
        weight: ``[shape]``; None means ones.
        dims: The dimensions of ``shape``, counted from the end.
        centered: Whether the norm subtracts the mean.
        like: Tensors of the shapes and dtypes of the gradients.
    """
    inner = grad if weight is None else grad * weight
    of_x = inner - y * (inner * y).mean(dims, keepdim=True)
    if centered:
        of_x = of_x - inner.mean(dims, keepdim=True)
    found = (of_x * factor, grad * y, grad)[: len(like)]  # torch.compile of 2.6 zips equal lengths
    return [f.sum_to_size(t.shape).to(t.dtype) for f, t in zip(found, like, strict=True)]
