"""Weight normalization of a module's parameters, based on torch's parametrizations."""

from apex.reparameterization.apply import (
    apply_reparameterization,
    apply_weight_norm,
    remove_reparameterization,
    remove_weight_norm,
)
from apex.reparameterization.reparameterization import Reparameterization
from apex.reparameterization.weight_norm import WeightNorm

__all__ = [
    "Reparameterization",
    "WeightNorm",
    "apply_reparameterization",
    "apply_weight_norm",
    "remove_reparameterization",
    "remove_weight_norm",
]
