"""apex's autograd functions: ``X.apply(...)`` with apex's argument order and torch's kernels.

As in apex, ``apply`` ignores autocast: the result has the input's dtype (in the mixed functions,
the weight's). The functions of `fused_layer_norm` follow autocast. ``memory_efficient`` has no
effect: the input is kept for the backward.
"""

# ruff: noqa: A002 - `input` is apex's and torch's name for it

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from apex._core.foreach.working import math_dtype
from apex.normalization._compute import Shape, norm, norm_gradients


class _NormFunction(torch.autograd.Function):
    """A norm of which torch knows the gradients, too.

    Note [Gradients of a norm]
        ``apply`` runs the operators in ``forward`` as they are: torch's kernels compute their
        gradients, faster than a function in Python, and second derivatives and ``torch.func``
        work. ``backward`` is for subclasses, which may replace either method, and for
        ``torch.compile``, which calls both methods by itself.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Returns the norm; the arguments are those of ``forward`` without ``ctx``."""
        if cls.__module__ != __name__:
            return super().apply(*args)  # type: ignore[no-untyped-call]
        return cls.forward(_Unused(), *args)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """Returns the gradients of the tensors, then None for each other argument."""
        return *_gradients(ctx, grad_output), None, None, None


class _Unused:
    """The ``ctx`` of a norm whose ``backward`` is never called."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keeps nothing."""


class FusedLayerNormAffineFunction(_NormFunction):
    """Layer norm with weight and bias; the result has the input's dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the normalized input."""
        return _norm(ctx, normalized_shape, eps, input, weight, bias, like=input, centered=True)


class FusedLayerNormAffineMixedDtypesFunction(FusedLayerNormAffineFunction):
    """Layer norm with weight and bias; the result has the weight's dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the normalized input."""
        return _norm(ctx, normalized_shape, eps, input, weight, bias, like=weight, centered=True)


class FusedLayerNormFunction(_NormFunction):
    """Layer norm without parameters; the result has the input's dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the normalized input."""
        return _norm(ctx, normalized_shape, eps, input, like=input, centered=True)


class FusedRMSNormAffineFunction(_NormFunction):
    """RMS norm with a weight; the result has the input's dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the normalized input."""
        return _norm(ctx, normalized_shape, eps, input, weight, like=input, centered=False)


class FusedRMSNormAffineMixedDtypesFunction(FusedRMSNormAffineFunction):
    """RMS norm with a weight; the result has the weight's dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the normalized input."""
        return _norm(ctx, normalized_shape, eps, input, weight, like=weight, centered=False)


class FusedRMSNormFunction(_NormFunction):
    """RMS norm without a weight; the result has the input's dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the normalized input."""
        return _norm(ctx, normalized_shape, eps, input, like=input, centered=False)


def _norm(
    ctx: Any,
    shape: Shape,
    eps: float,
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    like: Tensor,
    centered: bool,
) -> Tensor:
    """Returns the norm in the dtype of ``like``; keeps in ``ctx`` what its gradients need."""
    ctx.save_for_backward(*(each for each in (input, weight, bias) if each is not None))
    ctx.normalized_shape, ctx.eps, ctx.centered = shape, eps, centered
    given = (input, shape, weight, bias, eps)
    return norm(*given, out=like.dtype, centered=centered, autocasts=False)


def _gradients(ctx: Any, grad_output: Tensor) -> list[Tensor]:
    """Returns the gradients of the saved tensors: the input, and where given, weight and bias."""
    saved = ctx.saved_tensors
    shape = ctx.normalized_shape
    dims = tuple(range(-1 if isinstance(shape, int) else -len(shape), 0))
    wide = math_dtype(grad_output, *saved)
    x = saved[0].to(wide)
    if ctx.centered:
        x = x - x.mean(dims, keepdim=True)
    factor = torch.rsqrt(x.square().mean(dims, keepdim=True) + ctx.eps)
    weight = saved[1].to(wide) if len(saved) > 1 else None
    return norm_gradients(
        grad_output.to(wide), x * factor, factor, weight, dims, centered=ctx.centered, like=saved
    )
