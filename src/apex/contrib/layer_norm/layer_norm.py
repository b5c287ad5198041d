"""FastLayerNorm with torch's layer norm, for any hidden size, dtype and device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from apex.normalization.fused_layer_norm import (
    FusedLayerNormAffineFunction,
    fused_layer_norm_affine,
)


class FastLayerNormFN:
    """apex's autograd function; ``apply`` runs torch's kernel and ignores autocast."""

    @staticmethod
    def forward(
        ctx: object,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        epsilon: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the normalized ``x``, ``[*, hidden]``, in its dtype; ``ctx`` is ignored."""
        normed: Tensor = FusedLayerNormAffineFunction.apply(x, gamma, beta, gamma.shape, epsilon)
        return normed

    @classmethod
    def apply(
        cls,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        epsilon: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Returns the normalized ``x``, ``[*, hidden]``, in its dtype."""
        return cls.forward(None, x, gamma, beta, epsilon, memory_efficient)


def _fast_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, memory_efficient: bool = False
) -> Tensor:
    """Returns the layer norm of ``x`` and follows autocast; libraries import this name."""
    return fused_layer_norm_affine(x, weight, bias, weight.shape, epsilon, memory_efficient)


class FastLayerNorm(nn.Module):
    """Layer norm over the last dimension; the result has the input's or autocast's dtype.

    Args:
        hidden_size: Size of the last dimension; any.
        eps: Term added to the variance.
        memory_efficient: Has no effect: torch keeps the input for the backward.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__()
        self.epsilon = eps
        self.memory_efficient = memory_efficient
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to ones and the bias to zeros."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalized input, ``[*, hidden_size]``."""
        return _fast_layer_norm(x, self.weight, self.bias, self.epsilon, self.memory_efficient)

    def extra_repr(self) -> str:
        """Returns hidden size and eps."""
        return f"{self.weight.numel()}, eps={self.epsilon}"
