"""Weight normalization: a weight as the product of magnitude and direction.

Source: Salimans and Kingma, "Weight Normalization", arXiv:1602.07868.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from apex import _unavailable
from apex.reparameterization.reparameterization import Reparameterization

__getattr__ = _unavailable.names_instead(
    __name__, {"HALF_TYPES": "tensor.dtype, which is torch.float16 on every device"}
)


class WeightNorm(Reparameterization):
    """``w = g * v / |v|`` with the parts ``weight_g`` and ``weight_v``."""

    def compute_weight(self, module: Any = None, name: str | None = None) -> Tensor:
        """Returns the weight computed from magnitude and direction."""
        own = self.module if module is None else module
        owner, own_name = self.get_module_and_name(own, self.name if name is None else name)
        direction: Tensor = getattr(owner, f"{own_name}_v")
        magnitude: Tensor = getattr(owner, f"{own_name}_g")
        return torch._weight_norm(direction, magnitude, _kept(direction, self.dim))

    def reparameterize(
        self, name: str, weight: Tensor, dim: int | None
    ) -> tuple[list[str], list[Tensor]]:
        """Returns names and values of magnitude and direction, which is the weight itself."""
        weight = weight.detach()
        magnitude = torch.norm_except_dim(weight, 2, _kept(weight, dim))
        return [f"{name}_g", f"{name}_v"], [nn.Parameter(magnitude), nn.Parameter(weight)]


def _kept(weight: Tensor, dim: int | None) -> int:
    return -1 if dim is None else dim % weight.dim()  # torch's convention for the whole weight
