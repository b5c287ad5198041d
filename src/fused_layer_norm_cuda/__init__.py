"""apex's ``fused_layer_norm_cuda``: layer norm and RMS norm with their statistics, and backward.

Autograd functions of other projects call it (NVIDIA's Transformer, Fast-LLM, VeOmni). It runs on
every device and accepts any mix of floating dtypes. It computes in fp32 (fp64 for fp64 tensors) and
rounds once. Statistics are fp32 or wider, of shape ``[rows]``. No function here records gradients.
"""

# ruff: noqa: A002 - `input` is apex's and torch's name for it

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from apex._core.dtypes import math_dtype

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
    """Returns the normalized input, the rows' means, and the inverse of their deviations.

    The result has the input's dtype, or ``out``. With ``centered=False`` this is an RMS norm, which
    has no means.
    """
    y, wide_weight, wide_bias = _widened(input, weight, bias)
    dims = tuple(range(-len(normalized_shape), 0))
    statistics = []
    if centered:
        mean = y.mean(dims, keepdim=True)
        y = y - mean
        statistics.append(mean.flatten())
    invvar = torch.rsqrt(y.square().mean(dims, keepdim=True) + eps)
    statistics.append(invvar.flatten())
    y = y * invvar
    if weight is not None:
        y = y * wide_weight
    if bias is not None:
        y = y + wide_bias
    return [y.to(out or input.dtype), *statistics]


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
    """Returns the RMS norm of the input, and the inverse of each row's root mean square."""
    return forward_affine(input, normalized_shape, weight, None, eps, centered=False)


def rms_forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: Shape, weight: Tensor, eps: float
) -> list[Tensor]:
    """Returns `rms_forward_affine` with a result of the weight's dtype."""
    return forward_affine(
        input, normalized_shape, weight, None, eps, out=weight.dtype, centered=False
    )


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
    """Returns the gradients of the input, and if given, of weight and bias.

    Let ``y`` be the input divided by its deviation, and ``grad_y`` its gradient. The input's
    gradient is ``(grad_y - y * mean(grad_y * y)) / deviation``. A centered norm also subtracts the
    mean of ``grad_y``.

    Args:
        grad: Gradient of the result.
        mean: Mean of each row, ``[rows]``; ignored if ``memory_efficient``.
        invvar: Inverse of each row's deviation, ``[rows]``.
        input_or_output: The forward's input, or its result if ``memory_efficient``.
        normalized_shape: Sizes of the last dimensions.
        weight: Weight of the norm.
        bias: Bias of the norm.
        eps: Smallest magnitude of a weight that divides the result.
        memory_efficient: Whether to compute the input from the result.
        centered: False for an RMS norm.
    """
    wide_grad, y, wide_weight, wide_bias = _widened(grad, input_or_output, weight, bias)
    inner = len(normalized_shape)
    dims = tuple(range(-inner, 0))
    rows = y.shape[:-inner] + (1,) * inner
    factor = invvar.to(y.dtype).view(rows)
    if memory_efficient:
        if bias is not None:
            y = y - wide_bias
        if weight is not None:
            magnitude = wide_weight.abs().clamp(min=eps)
            y = y / magnitude.copysign(wide_weight)
    else:
        if mean is not None:
            y = y - mean.to(y.dtype).view(rows)
        y = y * factor
    grad_y = wide_grad if weight is None else wide_grad * wide_weight
    grad_x = grad_y - y * (grad_y * y).mean(dims, keepdim=True)
    if centered:
        grad_x = grad_x - grad_y.mean(dims, keepdim=True)
    grad_input = grad_x * factor
    grads = [grad_input.to(input_or_output.dtype)]
    if weight is not None:
        grad_weight = (wide_grad * y).sum_to_size(weight.shape)
        grads.append(grad_weight.to(weight.dtype))
    if bias is not None:
        grad_bias = wide_grad.sum_to_size(bias.shape)
        grads.append(grad_bias.to(bias.dtype))
    return grads


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
    (grad_input,) = backward_affine(
        grad, mean, invvar, input_or_output, normalized_shape, None, None, eps, memory_efficient
    )
    return grad_input


def rms_backward_affine(
    grad: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None,
    eps: float,
    memory_efficient: bool = False,
) -> list[Tensor]:
    """Returns the gradients of the input, and if given, of the weight; see `backward_affine`."""
    return backward_affine(
        grad,
        None,
        invvar,
        input_or_output,
        normalized_shape,
        weight,
        None,
        eps,
        memory_efficient,
        centered=False,
    )


def rms_backward(
    grad: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Shape,
    eps: float,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the input's gradient; see `backward_affine`."""
    (grad_input,) = rms_backward_affine(
        grad, invvar, input_or_output, normalized_shape, None, eps, memory_efficient
    )
    return grad_input


def _widened(*tensors: Tensor | None) -> list[Any]:
    """Returns the tensors in the dtype of the computation; keeps None."""
    present = [tensor for tensor in tensors if tensor is not None]
    wide = math_dtype(*present)
    return [None if tensor is None else tensor.to(wide) for tensor in tensors]
