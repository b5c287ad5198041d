"""apex's deprecated optimizers, kept for the scripts that still import them."""

from apex.contrib.optimizers.fp16_optimizer import FP16_Optimizer
from apex.contrib.optimizers.fused_adam import FusedAdam
from apex.contrib.optimizers.fused_lamb import FusedLAMB
from apex.contrib.optimizers.fused_sgd import FusedSGD

__all__ = ["FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD"]
