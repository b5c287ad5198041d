"""apex's first FusedSGD: gradients and outputs as arguments of ``step``."""

from apex import optimizers
from apex.contrib.optimizers.explicit import ExplicitOptimizer


class FusedSGD(ExplicitOptimizer, optimizers.FusedSGD):
    """SGD with momentum; uses the parameters' own gradients unless others are passed."""
