"""torch's ``ZeroRedundancyOptimizer``: ranks hold shards of the optimizer's state."""

from __future__ import annotations

from torch.optim import Optimizer

from apex._core.param_groups import is_from

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"
"""By name: importing the class is slow, and only scripts that use it have done so."""


def check(optimizer: Optimizer) -> None:
    """Raises RuntimeError if an optimizer, which is to get masters, is one."""
    if is_from(optimizer, _MODULE):
        raise RuntimeError(
            "amp.initialize got a ZeroRedundancyOptimizer, whose inner optimizer steps the "
            "model's own parameters and would never see fp32 masters. Use opt_level 'O1' or "
            "'O4', or fully_shard(model) at O0 with a MixedPrecisionPolicy."
        )
