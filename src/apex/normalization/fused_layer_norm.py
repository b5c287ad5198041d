"""Fused norms: modules, functions and autograd functions with apex's names.

The result of a fused norm has the input's dtype, that of a mixed norm the weight's. Under autocast,
both have autocast's dtype, unlike torch's layer norm, whose result is fp32.
"""

# ruff: noqa: A002 - `input` is apex's and torch's name for it

from __future__ import annotations

import torch
from torch import Tensor

from apex import _unavailable
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

__getattr__ = _unavailable.names_instead(
    __name__,
    {
        f"{name}_{part}": f"{name}, whose gradients torch computes"
        for name in __all__
        if name.startswith("fused_")
        for part in ("fwd", "fwd_fake", "bwd", "bwd_fake")
    }
    | {
        "fused_layer_norm_cuda": "torch.nn.functional.layer_norm, which has a kernel per device",
        "supports_custom_op": "torch.library.custom_op, which every supported torch has",
    },
)


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
        input: ``[*, normalized_shape]``; may have any memory layout and may be empty.
        weight: ``[normalized_shape]``.
        bias: ``[normalized_shape]``.
        normalized_shape: Dimensions over which to normalize; an integer means the last one.
        eps: Term added to the variance.
        memory_efficient: Has no effect.
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
    """Returns the RMS norm in the dtype that T5 in transformers uses.

    This is the dtype of a low-precision weight, or otherwise the widest of input, weight and fp32.
    """
    out = torch.promote_types(input.dtype, torch.float32)
    if weight is not None:
        low = weight.dtype in (torch.float16, torch.bfloat16)
        out = weight.dtype if low else torch.promote_types(out, weight.dtype)
    return rms_norm(input, normalized_shape, weight, eps, out=out)
