"""Every fused norm by name, with one way to call functions, autograd functions and references."""

import torch

from apex.normalization import fused_layer_norm as fused
from tests.support.reference import norms

FULL, BF16, HALF, DOUBLE = torch.float32, torch.bfloat16, torch.float16, torch.float64
SIZE = 8

# Names to (is it RMS norm, does the result have the weight's dtype).
AFFINE = {
    "fused_layer_norm_affine": (False, False),
    "mixed_dtype_fused_layer_norm_affine": (False, True),
    "fused_rms_norm_affine": (True, False),
    "mixed_dtype_fused_rms_norm_affine": (True, True),
}
PLAIN = {"fused_layer_norm": False, "fused_rms_norm": True}
FUNCTION_CLASSES = {
    "fused_layer_norm_affine": "FusedLayerNormAffineFunction",
    "mixed_dtype_fused_layer_norm_affine": "FusedLayerNormAffineMixedDtypesFunction",
    "fused_rms_norm_affine": "FusedRMSNormAffineFunction",
    "mixed_dtype_fused_rms_norm_affine": "FusedRMSNormAffineMixedDtypesFunction",
    "fused_layer_norm": "FusedLayerNormFunction",
    "fused_rms_norm": "FusedRMSNormFunction",
}
MODULES = ("FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm")


def tensors(dtype=FULL, weight_dtype=None, *, shape=(3, 4, SIZE), device="cpu"):
    """Returns input, weight and bias, all with gradients."""
    made = torch.randn(shape), 1 + torch.randn(SIZE) / 4, torch.randn(SIZE) / 4
    dtypes = dtype, weight_dtype or dtype, weight_dtype or dtype
    return [
        tensor.to(device, kind).requires_grad_() for tensor, kind in zip(made, dtypes, strict=True)
    ]


def run(name, x, weight, bias, *, eps=1e-5, **kwargs):
    """Calls an affine function of `fused` by name."""
    params = (weight,) if AFFINE[name][0] else (weight, bias)
    return getattr(fused, name)(x, *params, (SIZE,), eps, **kwargs)


def reference(name, x, weight, bias, *, eps=1e-5):
    """What the affine function ``name`` should give, in fp64."""
    if AFFINE[name][0]:
        return norms.rms_norm(x, weight, eps=eps)
    return norms.layer_norm(x, weight, bias, eps=eps)


def leaves(name, x, weight, bias):
    return [x, weight] if AFFINE[name][0] else [x, weight, bias]


def gradients(result, inputs):
    """Gradients of a weighted sum, so that no two elements count alike."""
    scale = torch.linspace(-1, 1, result.numel(), device=result.device).view_as(result)
    return torch.autograd.grad((result * scale.to(result.dtype)).sum(), inputs)
