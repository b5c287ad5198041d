"""Weight normalization: a weight as the product of magnitude and direction.

Source: Salimans and Kingma, "Weight Normalization", arXiv:1602.07868.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex.reparameterization.reparameterization import Reparameterization


class WeightNorm(Reparameterization):
    """``w = g * v / |v|`` with the parts ``weight_g`` and ``weight_v``.

    Args:
        dim: Dimension whose entries each have a norm; None for one norm of the whole weight.
    """

    suffixes = ("_g", "_v")

    def __init__(self, dim: int | None = 0) -> None:
        super().__init__(dim)
        self._kept = (
            -1 if dim is None else dim
        )  # torch's convention for one norm of the whole weight

    def forward(self, *parts: Tensor) -> Tensor:
        """Returns the weight computed from magnitude and direction."""
        magnitude, direction = parts
        return torch._weight_norm(direction, magnitude, self._kept)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Returns magnitude and direction; the direction is the weight itself."""
        return torch.norm_except_dim(weight, 2, self._kept), weight

    def extra_repr(self) -> str:
        """Returns the dimension."""
        return f"dim={self.dim}"
