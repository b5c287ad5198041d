"""Layer norm and RMS norm with torch's kernels, for inputs and weights of different dtypes.

Source: Ba et al., "Layer Normalization", arXiv:1607.06450; Zhang and Sennrich, "Root Mean Square
Layer Normalization", arXiv:1910.07467.
"""

# ruff: noqa: A001, A002 - `input` is apex's and torch's name for it

from __future__ import annotations

import functools
import numbers
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from apex._core.dtypes import CASTABLE, LOW_PRECISION
from apex._torch.dispatcher import is_under_autocast

Shape = int | Sequence[int]
"""Sizes of the last dimensions; an integer means one dimension."""

_is_compiling = torch.compiler.is_compiling
_set_on = torch.set_autocast_enabled


def norm(
    input: Tensor,
    shape: Shape,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    out: torch.dtype,
    centered: bool,
    autocasts: bool = True,
) -> Tensor:
    """Returns a layer norm or an RMS norm.

    These are ``(x - mean) / sqrt(variance + eps) * weight + bias``, and
    ``x / sqrt(mean(x^2) + eps) * weight``. Statistics are fp32 or wider. If dtypes differ, the norm
    is computed in the widest of them and rounded once.

    Args:
        input: ``[*, shape]``.
        shape: Sizes of the last dimensions, over which to normalize.
        weight: ``[shape]``; None means ones.
        bias: ``[shape]``; None means zeros, as for every RMS norm.
        eps: Term added to the variance or the mean square.
        out: Dtype of the result.
        centered: Whether it is a layer norm, which subtracts the mean.
        autocasts: Whether the result has autocast's dtype under autocast.

    Raises:
        TypeError: If dtypes differ and one is not fp16, bf16, fp32 or fp64.
    """
    if not is_under_autocast(input):
        return _norm(input, out, shape, weight, bias, eps, centered)
    # Without autocast, whose own rows would make the result fp32. torch's context manager clears
    # the cache of cast weights when it exits. Setting the flag does not, and takes a tenth of the
    # time.
    device = input.device.type
    if autocasts and input.dtype is not torch.float64:  # autocast does not cast float64 either
        out = torch.get_autocast_dtype(device)
    if _is_compiling():
        with torch.autocast(device, enabled=False):
            return _norm(input, out, shape, weight, bias, eps, centered)
    _set_on(device, False)
    try:
        return _norm(input, out, shape, weight, bias, eps, centered)
    finally:
        _set_on(device, True)


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


def _norm(
    input: Tensor,
    out: torch.dtype,
    shape: Shape,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
) -> Tensor:
    direct = _is_direct(input, out, weight, bias)
    if not (direct or (centered and _cpu_takes(input, out, weight, bias))):
        # With different dtypes, torch's kernel of the RMS norm warns and falls back to several
        # operators.
        wide = _widest(input, out, weight, bias)
        input = input.to(wide)
        weight = None if weight is None else weight.to(wide)
        bias = None if bias is None else bias.to(wide)
    sizes = _sizes(shape)
    if centered:
        result = F.layer_norm(input, sizes, weight, bias, eps)
    else:
        result = F.rms_norm(input, sizes, weight, eps)
    return result if result.dtype is out else result.to(out)


def _sizes(shape: Shape) -> list[int]:
    if isinstance(shape, tuple):  # includes torch.Size; torch accepts both, its stubs only a list
        return shape  # type: ignore[return-value]
    return [int(shape)] if isinstance(shape, numbers.Integral) else list(shape)  # type: ignore[arg-type]


def _is_direct(input: Tensor, out: torch.dtype, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Returns whether the kernel can run without casts and without rounding its result twice."""
    given = input.dtype
    return (
        (given is out or given not in LOW_PRECISION)
        and (weight is None or weight.dtype is given)
        and (bias is None or bias.dtype is given)
    )


def _cpu_takes(input: Tensor, out: torch.dtype, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Returns whether torch's CPU kernel supports this: low-precision input, fp32 parameters."""
    return (
        input.device.type == "cpu"
        and out is input.dtype
        and out in LOW_PRECISION
        and (weight is None or weight.dtype is torch.float32)
        and (bias is None or bias.dtype is torch.float32)
    )


def _widest(input: Tensor, out: torch.dtype, *params: Tensor | None) -> torch.dtype:
    dtypes = [input.dtype, out, *(param.dtype for param in params if param is not None)]
    for dtype in dtypes:
        if dtype not in CASTABLE:
            raise TypeError(
                f"A fused norm got a tensor of {dtype}; it takes float16, bfloat16, float32 and "
                "float64, in any combination. Cast the input or the parameters first."
            )
    return functools.reduce(torch.promote_types, dtypes)
