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
        module = self.module if module is None else module
        name = self.name if name is None else name
        owner, own_name = self.get_module_and_name(module, name)
        direction: Tensor = getattr(owner, f"{own_name}_v")
        magnitude: Tensor = getattr(owner, f"{own_name}_g")
        return torch._weight_norm(direction, magnitude, _torch_dim(direction, self.dim))

    def reparameterize(
        self, name: str, weight: Tensor, dim: int | None
    ) -> tuple[list[str], list[Tensor]]:
        """Returns names and values of the magnitude and of the direction (the weight itself)."""
        weight = weight.detach()
        magnitude = torch.norm_except_dim(weight, 2, _torch_dim(weight, dim))
        return [f"{name}_g", f"{name}_v"], [nn.Parameter(magnitude), nn.Parameter(weight)]


def _torch_dim(weight: Tensor, dim: int | None) -> int:
    return -1 if dim is None else dim % weight.dim()  # -1 means one norm of the whole weight
