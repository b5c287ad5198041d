"""Fused norms: modules, functions and autograd functions by apex's names.

Fused: the result has the input's dtype. Mixed: it has the weight's. Under autocast both have
autocast's, unlike torch's layer norm, whose result is fp32 there.
"""

# ruff: noqa: A002 - `input` is apex's and torch's name for it

from __future__ import annotations

import torch
from torch import Tensor

from apex.normalization._compute import Shape, layer_norm, rms_norm
from apex.normalization._functions import (
    FusedLayerNormAffineFunction,
    FusedLayerNormAffineMixedDtypesFunction,
    FusedLayerNormFunction,
    FusedRMSNormAffineFunction,
    FusedRMSNormAffineMixedDtypesFunction,
    FusedRMSNormFunction,
)
from apex.normalization._modules import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
)

__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormAffineMixedDtypesFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormAffineMixedDtypesFunction",
    "FusedRMSNormFunction",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the layer norm of ``input`` in its dtype.

    Args:
        input: ``[*, normalized_shape]``; any memory layout, also empty.
        weight: ``[normalized_shape]``.
        bias: ``[normalized_shape]``.
        normalized_shape: Dimensions to normalize over; an integer means the last one.
        eps: Added to the variance.
        memory_efficient: Changes nothing.
    """
    return layer_norm(input, normalized_shape, weight, bias, eps, out=input.dtype, autocasts=True)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Returns the layer norm of ``input`` in its dtype, without weight and bias."""
    return layer_norm(input, normalized_shape, None, None, eps, out=input.dtype, autocasts=True)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the layer norm of ``input`` in the weight's dtype."""
    return layer_norm(input, normalized_shape, weight, bias, eps, out=weight.dtype, autocasts=True)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the RMS norm of ``input`` in its dtype."""
    return rms_norm(input, normalized_shape, weight, eps, out=input.dtype, autocasts=True)


def fused_rms_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Returns the RMS norm of ``input`` in its dtype, without a weight."""
    return rms_norm(input, normalized_shape, None, eps, out=input.dtype, autocasts=True)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the RMS norm of ``input`` in the weight's dtype."""
    return rms_norm(input, normalized_shape, weight, eps, out=weight.dtype, autocasts=True)


def manual_rms_norm(
    input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float
) -> Tensor:
    """Returns the RMS norm in the dtype in which T5 of transformers computes it.

    That is a low-precision weight's dtype, otherwise the widest of input, weight and fp32.
    """
    out = torch.promote_types(input.dtype, torch.float32)
    if weight is not None:
        low = weight.dtype in (torch.float16, torch.bfloat16)
        out = weight.dtype if low else torch.promote_types(out, weight.dtype)
    return rms_norm(input, normalized_shape, weight, eps, out=out)
