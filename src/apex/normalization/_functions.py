"""apex's autograd functions: ``X.apply(...)`` with apex's argument order and torch's kernels.

These are plain classes, so autograd, double backward and ``torch.compile`` see torch's operators.
``memory_efficient`` has no effect: torch keeps the input for the backward. As in apex, ``apply``
ignores autocast: the result has the input's dtype (in the mixed functions, the weight's). The
functions of `fused_layer_norm` follow autocast.
"""

# ruff: noqa: A002 - `input` is apex's and torch's name for it

from __future__ import annotations

from torch import Tensor

from apex.normalization._compute import Shape, layer_norm, rms_norm


class FusedLayerNormAffineFunction:
    """Layer norm with weight and bias; the result has the input's dtype."""

    @staticmethod
    def forward(
        ctx: object,
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the normalized input; ``ctx`` is ignored."""
        return layer_norm(input, normalized_shape, weight, bias, eps, out=input.dtype)

    @classmethod
    def apply(
        cls,
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the normalized input."""
        return cls.forward(None, input, weight, bias, normalized_shape, eps, memory_efficient)


class FusedLayerNormAffineMixedDtypesFunction(FusedLayerNormAffineFunction):
    """Layer norm with weight and bias; the result has the weight's dtype."""

    @staticmethod
    def forward(
        ctx: object,
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the normalized input; ``ctx`` is ignored."""
        return layer_norm(input, normalized_shape, weight, bias, eps, out=weight.dtype)


class FusedLayerNormFunction:
    """Layer norm without parameters; the result has the input's dtype."""

    @staticmethod
    def forward(
        ctx: object,
        input: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the normalized input; ``ctx`` is ignored."""
        return layer_norm(input, normalized_shape, None, None, eps, out=input.dtype)

    @classmethod
    def apply(
        cls, input: Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False
    ) -> Tensor:
        """Returns the normalized input."""
        return cls.forward(None, input, normalized_shape, eps, memory_efficient)


class FusedRMSNormAffineFunction:
    """RMS norm with a weight; the result has the input's dtype."""

    @staticmethod
    def forward(
        ctx: object,
        input: Tensor,
        weight: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the normalized input; ``ctx`` is ignored."""
        return rms_norm(input, normalized_shape, weight, eps, out=input.dtype)

    @classmethod
    def apply(
        cls,
        input: Tensor,
        weight: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the normalized input."""
        return cls.forward(None, input, weight, normalized_shape, eps, memory_efficient)


class FusedRMSNormAffineMixedDtypesFunction(FusedRMSNormAffineFunction):
    """RMS norm with a weight; the result has the weight's dtype."""

    @staticmethod
    def forward(
        ctx: object,
        input: Tensor,
        weight: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the normalized input; ``ctx`` is ignored."""
        return rms_norm(input, normalized_shape, weight, eps, out=weight.dtype)


class FusedRMSNormFunction:
    """RMS norm without a weight; the result has the input's dtype."""

    @staticmethod
    def forward(
        ctx: object,
        input: Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the normalized input; ``ctx`` is ignored."""
        return rms_norm(input, normalized_shape, None, eps, out=input.dtype)

    @classmethod
    def apply(
        cls, input: Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False
    ) -> Tensor:
        """Returns the normalized input."""
        return cls.forward(None, input, normalized_shape, eps, memory_efficient)
