"""Fused norms: modules, functions and autograd functions with apex's names, on torch's kernels.

The result of a fused norm has the input's dtype; the result of a mixed norm has the weight's dtype.
Under autocast, both have autocast's dtype; the result of torch's own layer norm is fp32.

Sources: Ba et al., "Layer Normalization", arXiv:1607.06450; Zhang and Sennrich, "Root Mean Square
Layer Normalization", arXiv:1910.07467.
"""

# ruff: noqa: A001, A002 - `input` is apex's and torch's name for it

from __future__ import annotations

import functools
import numbers
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]

from apex import _unavailable
from apex._core.arguments import flag
from apex._core.dtypes import CASTABLE, LOW_PRECISION
from apex._core.plain_function import PlainFunction
from apex._torch.dispatcher import is_under_autocast

_INSTEAD = {
    "fused_layer_norm_cuda": "the module of that name: import fused_layer_norm_cuda",
    "supports_custom_op": "torch.library.custom_op, which every supported torch has",
}
for _name in ("fused_layer_norm", "fused_rms_norm"):
    for _part in ("fwd", "fwd_fake", "bwd", "bwd_fake"):
        _INSTEAD[f"{_name}_{_part}"] = f"{_name}, whose gradients torch computes"
        _INSTEAD[f"{_name}_affine_{_part}"] = f"{_name}_affine, whose gradients torch computes"

__getattr__ = _unavailable.names_instead(__name__, _INSTEAD)

Shape = int | Sequence[int]
"""Sizes of the last dimensions; an integer means one dimension."""


def _norm(
    input: Tensor,
    shape: Shape,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    out: torch.dtype | None = None,
    centered: bool,
    autocasts: bool = True,
) -> Tensor:
    """Returns a layer norm or, if not ``centered``, an RMS norm, in ``out`` or the input's dtype.

    These are ``(x - mean) / sqrt(variance + eps) * weight + bias``, and
    ``x / sqrt(mean(x^2) + eps) * weight``. Statistics are fp32 or wider. If dtypes differ, the norm
    is computed in the widest of them and rounded once. Under autocast the result has autocast's
    dtype; with ``autocasts=False`` it still has the dtype ``out``.

    Raises:
        TypeError: If a dtype is not fp16, bf16, fp32 or fp64.
    """
    out = out or input.dtype
    under_autocast = is_under_autocast(input)
    if under_autocast and autocasts and input.dtype is not torch.float64:  # as autocast: fp64 stays
        out = torch.get_autocast_dtype(input.device.type)
    dtypes = {out, input.dtype}
    for param in (weight, bias):
        if param is not None:
            dtypes.add(param.dtype)
    # As autocast computes norms. And torch's kernel of layer norm on a CPU sums the gradients of
    # weight and bias in the input's dtype.
    if under_autocast or (centered and input.is_cpu):
        dtypes.add(torch.float32)
    wide = _widest(dtypes)
    input = input.to(wide)
    weight = None if weight is None else weight.to(wide)
    bias = None if bias is None else bias.to(wide)
    sizes: Any = [int(shape)] if isinstance(shape, numbers.Integral) else tuple(shape)  # type: ignore[arg-type]
    if centered:
        return F.layer_norm(input, sizes, weight, bias, eps).to(out)
    return F.rms_norm(input, sizes, weight, eps).to(out)


def _widest(dtypes: set[torch.dtype]) -> torch.dtype:
    """Returns the dtype to which torch promotes all of ``dtypes``."""
    for dtype in dtypes:
        if dtype not in CASTABLE:
            raise TypeError(
                f"A fused norm got a tensor of {dtype}; it takes float16, bfloat16, float32 and "
                "float64, in any combination. Cast the input or the parameters first."
            )
    return functools.reduce(torch.promote_types, dtypes)


class _NormFunction(PlainFunction):
    """A norm as an autograd function; the result has the input's dtype, or the weight's if mixed.

    As in apex, it ignores autocast. ``memory_efficient`` has no effect: torch always saves the
    input for the backward pass.
    """

    _centered = True
    _mixed = False

    @classmethod
    def _of(
        cls, input: Tensor, shape: Shape, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        out = input.dtype
        if cls._mixed and weight is not None:
            out = weight.dtype
        return _norm(
            input, shape, weight, bias, eps, out=out, centered=cls._centered, autocasts=False
        )


class FusedLayerNormAffineFunction(_NormFunction):
    """Layer norm with weight and bias; the result has the input's dtype."""

    @classmethod
    def forward(
        cls,
        ctx: object,
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the normalized input."""
        return cls._of(input, normalized_shape, weight, bias, eps)


class FusedLayerNormAffineMixedDtypesFunction(FusedLayerNormAffineFunction):
    """Layer norm with weight and bias; the result has the weight's dtype."""

    _mixed = True


class FusedRMSNormAffineFunction(_NormFunction):
    """RMS norm with a weight; the result has the input's dtype."""

    _centered = False

    @classmethod
    def forward(
        cls,
        ctx: object,
        input: Tensor,
        weight: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the normalized input."""
        return cls._of(input, normalized_shape, weight, None, eps)


class FusedRMSNormAffineMixedDtypesFunction(FusedRMSNormAffineFunction):
    """RMS norm with a weight; the result has the weight's dtype."""

    _mixed = True


class FusedLayerNormFunction(_NormFunction):
    """Layer norm without parameters; the result has the input's dtype."""

    @classmethod
    def forward(
        cls,
        ctx: object,
        input: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the normalized input."""
        return cls._of(input, normalized_shape, None, None, eps)


class FusedRMSNormFunction(FusedLayerNormFunction):
    """RMS norm without a weight; the result has the input's dtype."""

    _centered = False


class _FusedNorm(nn.Module):
    """Shape, eps and parameters, common to all fused norms."""

    # torch.jit.script reads this list; it does not support Final annotations in this syntax.
    __constants__ = ("eps", "normalized_shape")
    _centered = False
    """Whether it is a layer norm, which also has a bias, or an RMS norm."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        self.normalized_shape = _size(type(self).__name__, normalized_shape)
        self.eps = eps
        self.elementwise_affine = flag("elementwise_affine", elementwise_affine)
        self.memory_efficient = flag("memory_efficient", memory_efficient)
        self.weight: nn.Parameter | None
        self.bias: nn.Parameter | None
        for name in ("weight", "bias") if self._centered else ("weight",):
            param = None
            if self.elementwise_affine:
                param = nn.Parameter(torch.empty(self.normalized_shape))
            self.register_parameter(name, param)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to ones and the bias, if any, to zeros."""
        for name, param in self.named_parameters():
            value = 1.0 if name == "weight" else 0.0
            nn.init.constant_(param, value)

    def _out_dtype(self, input: Tensor) -> torch.dtype:
        """Returns the result's dtype without autocast."""
        return input.dtype

    def _normalized(self, input: Tensor, bias: Tensor | None) -> Tensor:
        return _norm(
            input,
            self.normalized_shape,
            self.weight,
            bias,
            self.eps,
            out=self._out_dtype(input),
            centered=self._centered,
        )

    def extra_repr(self) -> str:
        """Returns shape, eps and whether the norm has parameters."""
        return (
            f"{tuple(self.normalized_shape)}, eps={self.eps}, "
            f"elementwise_affine={self.elementwise_affine}"
        )


class FusedLayerNorm(_FusedNorm):
    """Layer norm whose result has the input's dtype, or autocast's under autocast.

    Args:
        normalized_shape: Trailing dimensions to normalize over; an integer means the last one.
        eps: Term added to the variance.
        elementwise_affine: Whether the norm has a trainable weight (initially ones) and bias
            (initially zeros).
        memory_efficient: Has no effect: torch keeps the input for the backward.

    Raises:
        TypeError: If ``normalized_shape`` is neither an integer nor a sequence of integers.
        ValueError: If it is empty.
    """

    _centered = True

    def forward(self, input: Tensor) -> Tensor:
        """Returns the normalized input, ``[*, normalized_shape]``."""
        if is_scripting():
            return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return self._normalized(input, self.bias)


class FusedRMSNorm(_FusedNorm):
    """RMS norm whose result has the input's dtype, or autocast's under autocast.

    Note [Low-precision weight]
        With a low-precision weight, the result has the weight's dtype even for fp32 input: T5 in
        fp16 keeps an fp32 residual, but its next layer accepts only fp16. apex's kernel rejected
        this combination; its CPU path behaved as here.

    Args:
        normalized_shape: Trailing dimensions to normalize over; an integer means the last one.
        eps: Term added to the mean square.
        elementwise_affine: Whether the norm has a trainable weight (initially ones).
        memory_efficient: Has no effect: torch keeps the input for the backward.

    Raises:
        TypeError: If ``normalized_shape`` is neither an integer nor a sequence of integers.
        ValueError: If it is empty.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Returns the normalized input, ``[*, normalized_shape]``."""
        if is_scripting():
            return F.rms_norm(input, self.normalized_shape, self.weight, self.eps)
        return self._normalized(input, None)

    def _out_dtype(self, input: Tensor) -> torch.dtype:
        if self.weight is not None and self.weight.dtype in LOW_PRECISION:
            return self.weight.dtype
        return input.dtype


class _Mixed(_FusedNorm):
    """Norms whose result has the weight's dtype."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient, **kwargs)
        if not self.elementwise_affine:
            raise RuntimeError(
                f"{type(self).__name__} got elementwise_affine=False; its result has the weight's "
                "dtype, so it needs a weight. Use FusedLayerNorm or FusedRMSNorm with "
                "elementwise_affine=False."
            )

    def _out_dtype(self, input: Tensor) -> torch.dtype:
        return input.dtype if self.weight is None else self.weight.dtype


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """Layer norm whose result has the weight's dtype, or autocast's under autocast.

    Args:
        normalized_shape: Trailing dimensions to normalize over; an integer means the last one.
        eps: Term added to the variance.
        memory_efficient: Has no effect.
        **kwargs: ``elementwise_affine``, which must be True.

    Raises:
        RuntimeError: If ``elementwise_affine`` is False.
        TypeError: If another keyword is given.
    """


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """RMS norm whose result has the weight's dtype, or autocast's under autocast.

    Takes the arguments, and raises the errors, of `MixedFusedLayerNorm`.
    """


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
    return _norm(input, normalized_shape, weight, bias, eps, centered=True)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Returns the layer norm of ``input`` in its dtype, without weight and bias."""
    return _norm(input, normalized_shape, None, None, eps, centered=True)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the layer norm of ``input`` in the weight's dtype."""
    return _norm(input, normalized_shape, weight, bias, eps, out=weight.dtype, centered=True)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the RMS norm of ``input`` in its dtype."""
    return _norm(input, normalized_shape, weight, None, eps, centered=False)


def fused_rms_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Returns the RMS norm of ``input`` in its dtype, without a weight."""
    return _norm(input, normalized_shape, None, None, eps, centered=False)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns the RMS norm of ``input`` in the weight's dtype."""
    return _norm(input, normalized_shape, weight, None, eps, out=weight.dtype, centered=False)


def manual_rms_norm(
    input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float
) -> Tensor:
    """Returns the RMS norm in the dtype that T5 in transformers uses.

    This is the dtype of a low-precision weight, or otherwise the widest of input, weight and fp32.
    """
    out = torch.promote_types(input.dtype, torch.float32)
    if weight is not None:
        if weight.dtype in LOW_PRECISION:
            out = weight.dtype
        else:
            out = torch.promote_types(out, weight.dtype)
    return _norm(
        input, normalized_shape, weight, None, eps, out=out, centered=False, autocasts=False
    )


def _size(module: str, shape: Shape) -> torch.Size:
    if isinstance(shape, numbers.Integral):
        return torch.Size((int(shape),))
    if not isinstance(shape, Sequence) or not all(isinstance(s, numbers.Integral) for s in shape):
        raise TypeError(
            f"{module} got normalized_shape={shape!r}; it takes an integer or a sequence of "
            "integers: the sizes of the last dimensions of the input."
        )
    if not shape:
        raise ValueError(
            f"{module} got an empty normalized_shape; pass at least the input's last dimension."
        )
    return torch.Size(shape)
