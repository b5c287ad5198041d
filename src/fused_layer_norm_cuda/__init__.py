"""apex's ``fused_layer_norm_cuda``: layer norm and RMS norm with their statistics, and backward.

Autograd functions of other projects call it (NVIDIA's Transformer, Fast-LLM, VeOmni). It runs on
every device, in any mix of floating dtypes: computed in fp32 (fp64 for fp64 tensors), rounded once.
Statistics are fp32 or wider, of shape ``[rows]``. Nothing here records gradients.
"""

# ruff: noqa: A002 - `input` is apex's and torch's name for it

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from apex._core.foreach.working import math_dtype

Shape = Sequence[int]


@torch.no_grad()
def forward_affine(
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    out: torch.dtype | None = None,
    centered: bool = True,
) -> list[Tensor]:
    """Returns the normalized input, the rows' means, and one over their deviations.

    The result has the input's dtype, or ``out``. An RMS norm, if not ``centered``, has no means.
    """
    (x, wide_weight, wide_bias), dims = _widened(input, weight, bias), _dims(normalized_shape)
    means = [x.mean(dims, keepdim=True)] if centered else []
    y = x - means[0] if centered else x
    invvar = torch.rsqrt(y.square().mean(dims, keepdim=True) + eps)
    y = y * invvar
    y = y if wide_weight is None else y * wide_weight
    y = y if wide_bias is None else y + wide_bias
    return [y.to(out or input.dtype), *(each.flatten() for each in (*means, invvar))]


def forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: Shape, weight: Tensor, bias: Tensor, eps: float
) -> list[Tensor]:
    """Returns `forward_affine` with a result of the weight's dtype."""
    return forward_affine(input, normalized_shape, weight, bias, eps, out=weight.dtype)


def forward(input: Tensor, normalized_shape: Shape, eps: float) -> list[Tensor]:
    """Returns `forward_affine` without weight and bias."""
    return forward_affine(input, normalized_shape, None, None, eps)


def rms_forward_affine(
    input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float
) -> list[Tensor]:
    """Returns the input over each row's root mean square with a weight, and one over these."""
    return forward_affine(input, normalized_shape, weight, None, eps, centered=False)


def rms_forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: Shape, weight: Tensor, eps: float
) -> list[Tensor]:
    """Returns `rms_forward_affine` with a result of the weight's dtype."""
    out = weight.dtype
    return forward_affine(input, normalized_shape, weight, None, eps, out=out, centered=False)


def rms_forward(input: Tensor, normalized_shape: Shape, eps: float) -> list[Tensor]:
    """Returns `rms_forward_affine` without a weight."""
    return rms_forward_affine(input, normalized_shape, None, eps)


@torch.no_grad()
def backward_affine(
    grad: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    memory_efficient: bool = False,
    *,
    centered: bool = True,
) -> list[Tensor]:
    """Returns the gradients of the input, and where given, of weight and bias.

    With ``y`` the input over its deviation and ``g`` the gradient that reaches it, the input's is
    ``(g - y * mean(g * y)) / deviation``, less its mean where the norm is centered.

    Args:
        grad: Gradient of the result.
        mean: Mean of each row, ``[rows]``; not read if ``memory_efficient``.
        invvar: One over each row's deviation, ``[rows]``.
        input_or_output: What was normalized, or the result if ``memory_efficient``.
        normalized_shape: Sizes of the last dimensions.
        weight: Weight of the norm.
        bias: Bias of the norm.
        eps: Least magnitude of a weight that the result is divided by.
        memory_efficient: Whether the input is computed from the result.
        centered: False for an RMS norm.
    """
    g, saved, wide_weight, wide_bias = _widened(grad, input_or_output, weight, bias)
    dims = _dims(normalized_shape)
    rows = (*saved.shape[: saved.dim() - len(dims)], *(1 for _ in dims))
    factor = invvar.to(saved.dtype).view(rows)
    if memory_efficient:
        y = saved if wide_bias is None else saved - wide_bias
        y = y if wide_weight is None else y / _away_from_zero(wide_weight, eps)
    else:
        y = (saved if mean is None else saved - mean.to(saved.dtype).view(rows)) * factor
    of_y = g if wide_weight is None else g * wide_weight
    of_x = of_y - y * (of_y * y).mean(dims, keepdim=True)
    if centered:
        of_x = of_x - of_y.mean(dims, keepdim=True)
    like = [each for each in (input_or_output, weight, bias) if each is not None]
    found = (of_x * factor, g * y, g)
    return [f.sum_to_size(t.shape).to(t.dtype) for f, t in zip(found, like, strict=False)]


def backward(
    grad: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Shape,
    eps: float,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the input's gradient; see `backward_affine`."""
    saved = (grad, mean, invvar, input_or_output, normalized_shape)
    return backward_affine(*saved, None, None, eps, memory_efficient)[0]


def rms_backward_affine(
    grad: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None,
    eps: float,
    memory_efficient: bool = False,
) -> list[Tensor]:
    """Returns the gradients of the input, and where given, of the weight; see `backward_affine`."""
    saved = (grad, None, invvar, input_or_output, normalized_shape)
    return backward_affine(*saved, weight, None, eps, memory_efficient, centered=False)


def rms_backward(
    grad: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Shape,
    eps: float,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the input's gradient; see `backward_affine`."""
    saved = (grad, invvar, input_or_output, normalized_shape)
    return rms_backward_affine(*saved, None, eps, memory_efficient)[0]


def _widened(*tensors: Tensor | None) -> list[Any]:
    wide = math_dtype(*(each for each in tensors if each is not None))
    return [None if each is None else each.to(wide) for each in tensors]


def _dims(shape: Shape) -> tuple[int, ...]:
    return tuple(range(-len(shape), 0))


def _away_from_zero(weight: Tensor, eps: float) -> Tensor:
    return torch.where(weight >= 0, weight.clamp(min=eps), weight.clamp(max=-eps))
