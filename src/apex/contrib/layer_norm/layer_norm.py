"""FastLayerNorm with torch's layer norm, for any hidden size, dtype and device."""

from __future__ import annotations

from torch import Tensor

from apex._core.plain_function import PlainFunction
from apex.normalization.fused_layer_norm import (
    FusedLayerNorm,
    FusedLayerNormAffineFunction,
    fused_layer_norm_affine,
)


class FastLayerNormFN(PlainFunction):
    """apex's autograd function, which ignores autocast."""

    @staticmethod
    def forward(
        ctx: object,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        epsilon: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the normalized ``x``, ``[*, hidden]``, in its dtype."""
        return FusedLayerNormAffineFunction.apply(x, gamma, beta, gamma.shape, epsilon)


def _fast_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, memory_efficient: bool = False
) -> Tensor:
    """Returns the layer norm of ``x`` and follows autocast; libraries import this name."""
    return fused_layer_norm_affine(x, weight, bias, weight.shape, epsilon, memory_efficient)


class FastLayerNorm(FusedLayerNorm):
    """Layer norm over the last dimension; the result has the input's or autocast's dtype.

    Args:
        hidden_size: Size of the last dimension; any.
        eps: Term added to the variance.
        memory_efficient: Has no effect: torch keeps the input for the backward.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__(hidden_size, eps, memory_efficient=memory_efficient)
        self.epsilon = eps
