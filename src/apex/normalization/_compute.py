"""Layer norm and RMS norm by torch's kernels, for inputs and weights of any two dtypes.

Source: Ba et al., "Layer Normalization", arXiv:1607.06450; Zhang and Sennrich, "Root Mean Square
Layer Normalization", arXiv:1910.07467.
"""

# ruff: noqa: A001, A002 - `input` is apex's and torch's name for it

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from apex._core.dtypes import CASTABLE, LOW_PRECISION

Shape = int | Sequence[int]
"""Sizes of the last dimensions; an integer stands for one."""

_is_compiling = torch.compiler.is_compiling
_is_on, _set_on = torch.is_autocast_enabled, torch.set_autocast_enabled


def layer_norm(
    input: Tensor,
    shape: Shape,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    out: torch.dtype,
    autocasts: bool = False,
) -> Tensor:
    """Returns ``(x - mean) / sqrt(variance + eps) * weight + bias``.

    Statistics are fp32 or wider. Where dtypes differ, the whole is computed in the widest of them
    and rounded once.

    Args:
        input: ``[*, shape]``.
        shape: Dimensions to normalize over, the last ones.
        weight: ``[shape]``; None means ones.
        bias: ``[shape]``; None means zeros.
        eps: Added to the variance.
        out: Dtype of the result.
        autocasts: Whether the result has autocast's dtype where that is on.

    Raises:
        TypeError: If dtypes differ and one of them is not fp16, bf16, fp32 or fp64.
    """
    if _under_autocast(input):
        return _without_autocast(_layer_norm, input, out, autocasts, shape, weight, bias, eps)
    return _layer_norm(input, out, shape, weight, bias, eps)


def rms_norm(
    input: Tensor,
    shape: Shape,
    weight: Tensor | None,
    eps: float,
    *,
    out: torch.dtype,
    autocasts: bool = False,
) -> Tensor:
    """Returns ``x / sqrt(mean(x^2) + eps) * weight``; arguments and precision as `layer_norm`."""
    if _under_autocast(input):
        return _without_autocast(_rms_norm, input, out, autocasts, shape, weight, eps)
    return _rms_norm(input, out, shape, weight, eps)


def _under_autocast(input: Tensor) -> bool:
    device = input.device.type
    return device != "meta" and _is_on(device)  # meta tensors have no autocast, asking raises


def _without_autocast(
    kernel: Callable[..., Tensor], input: Tensor, out: torch.dtype, autocasts: bool, *rest: Any
) -> Tensor:
    """Returns the kernel's result with autocast off: its own rows would make that fp32.

    torch's context manager clears the cache of cast weights when it ends; the bare switch does not,
    and takes a tenth of the time.
    """
    device = input.device.type
    if autocasts and input.dtype is not torch.float64:  # autocast itself leaves float64 alone
        out = torch.get_autocast_dtype(device)
    if _is_compiling():
        with torch.autocast(device, enabled=False):
            return kernel(input, out, *rest)
    _set_on(device, False)
    try:
        return kernel(input, out, *rest)
    finally:
        _set_on(device, True)


def _layer_norm(
    input: Tensor,
    out: torch.dtype,
    shape: Shape,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    if not (_is_direct(input, out, weight, bias) or _cpu_takes(input, out, weight, bias)):
        wide = _widest(input, out, weight, bias)
        input = input.to(wide)
        weight = None if weight is None else weight.to(wide)
        bias = None if bias is None else bias.to(wide)
    result = F.layer_norm(input, _sizes(shape), weight, bias, eps)
    return result if result.dtype is out else result.to(out)


def _rms_norm(
    input: Tensor, out: torch.dtype, shape: Shape, weight: Tensor | None, eps: float
) -> Tensor:
    if not _is_direct(input, out, weight, None):
        # On two dtypes torch's kernel warns and falls back to several operators.
        wide = _widest(input, out, weight)
        input = input.to(wide)
        weight = None if weight is None else weight.to(wide)
    result = F.rms_norm(input, _sizes(shape), weight, eps)
    return result if result.dtype is out else result.to(out)


def _sizes(shape: Shape) -> list[int]:
    if isinstance(shape, tuple):  # torch.Size is one; torch's stubs ask for a list, it takes both
        return shape  # type: ignore[return-value]
    return [int(shape)] if isinstance(shape, numbers.Integral) else list(shape)  # type: ignore[arg-type]


def _is_direct(input: Tensor, out: torch.dtype, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the kernel runs on the tensors as they are, and its result is not rounded twice."""
    given = input.dtype
    return (
        (given is out or given not in LOW_PRECISION)
        and (weight is None or weight.dtype is given)
        and (bias is None or bias.dtype is given)
    )


def _cpu_takes(input: Tensor, out: torch.dtype, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether torch's CPU kernel takes this mix itself: low-precision input, fp32 parameters."""
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
                "float64, also mixed. Cast the input or the parameters first."
            )
    return functools.reduce(torch.promote_types, dtypes)
