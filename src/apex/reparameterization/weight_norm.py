"""Weight normalization: a weight as the product of magnitude and direction.

Source: Salimans and Kingma, "Weight Normalization", arXiv:1602.07868.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        owner, own_name = self.get_module_and_name(module or self.module, name or self.name)
        direction = getattr(owner, f"{own_name}_v")
        magnitude = getattr(owner, f"{own_name}_g")
        return torch._weight_norm(direction, magnitude, _torch_dim(self.dim))

    def reparameterize(
        self, name: str, weight: Tensor, dim: int | None
    ) -> tuple[list[str], Sequence[Tensor]]:
        """Returns names and values of the magnitude and of the direction (the weight itself)."""
        direction = weight.detach()
        magnitude = torch.norm_except_dim(direction, 2, _torch_dim(dim))
        return [f"{name}_g", f"{name}_v"], [nn.Parameter(magnitude), nn.Parameter(direction)]


def _torch_dim(dim: int | None) -> int:
    """Returns ``dim`` in torch's form, in which -1 means one norm of the whole weight."""
    return -1 if dim is None else dim
