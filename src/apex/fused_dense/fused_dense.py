"""apex's dense layers on torch's operators, which are differentiable and follow autocast.

Weights are ``[out, in]``, biases ``[out]``, inputs ``[*, in]``.
"""

# ruff: noqa: A002 - `input` is apex's and torch's name for it

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from apex._core.plain_function import PlainFunction

__all__ = [
    "DenseNoBias",
    "DenseNoBiasFunc",
    "FusedDense",
    "FusedDenseFunc",
    "FusedDenseGeluDense",
    "FusedDenseGeluDenseFunc",
    "dense_no_bias_function",
    "fused_dense_function",
    "fused_dense_gelu_dense_function",
]


def fused_dense_function(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns a linear layer's output, ``[*, out]``."""
    return F.linear(input, weight, bias)


def dense_no_bias_function(input: Tensor, weight: Tensor) -> Tensor:
    """Returns a linear layer's output without bias, ``[*, out]``."""
    return F.linear(input, weight)


def fused_dense_gelu_dense_function(
    input: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
) -> Tensor:
    """Returns the output of two linear layers with an exact GELU between them."""
    return F.linear(F.gelu(F.linear(input, weight1, bias1)), weight2, bias2)


_fused_dense = fused_dense_function
_dense_no_bias = dense_no_bias_function
_fused_dense_gelu_dense = fused_dense_gelu_dense_function


class FusedDenseFunc(PlainFunction):
    """A linear layer as an autograd function."""

    @staticmethod
    def forward(ctx: object, input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Returns :func:`fused_dense_function` of the arguments."""
        return fused_dense_function(input, weight, bias)


class DenseNoBiasFunc(PlainFunction):
    """A linear layer without bias as an autograd function."""

    @staticmethod
    def forward(ctx: object, input: Tensor, weight: Tensor) -> Tensor:
        """Returns :func:`dense_no_bias_function` of the arguments."""
        return dense_no_bias_function(input, weight)


class FusedDenseGeluDenseFunc(PlainFunction):
    """Two linear layers with a GELU between them as an autograd function."""

    @staticmethod
    def forward(
        ctx: object, input: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
    ) -> Tensor:
        """Returns :func:`fused_dense_gelu_dense_function` of the arguments."""
        return fused_dense_gelu_dense_function(input, weight1, bias1, weight2, bias2)


class FusedDense(nn.Linear):
    """A linear layer, initialized like ``torch.nn.Linear`` (apex left it uninitialized)."""


class DenseNoBias(FusedDense):
    """A linear layer without bias; ``bias`` is ignored."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=False)


class FusedDenseGeluDense(nn.Module):
    """Two linear layers with an exact GELU between them, initialized as ``torch.nn.Linear``.

    Parameters are ``weight1`` (``[intermediate, in]``), ``bias1``, ``weight2``
    (``[out, intermediate]``) and ``bias2``.
    """

    def __init__(
        self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True
    ) -> None:
        """Creates the layers.

        Raises:
            ValueError: For ``bias=False``, which apex does not support either.
        """
        super().__init__()
        if not bias:
            raise ValueError(
                "FusedDenseGeluDense got bias=False; it has biases. Use torch.nn.Sequential of "
                "Linear(bias=False), GELU and Linear(bias=False)."
            )
        self.in_features = in_features
        self.intermediate_features = intermediate_features
        self.out_features = out_features
        first = nn.Linear(in_features, intermediate_features)
        second = nn.Linear(intermediate_features, out_features)
        self.weight1 = first.weight
        self.bias1 = first.bias
        self.weight2 = second.weight
        self.bias2 = second.bias

    def forward(self, input: Tensor) -> Tensor:
        """Returns ``[*, out_features]``."""
        return fused_dense_gelu_dense_function(
            input, self.weight1, self.bias1, self.weight2, self.bias2
        )
