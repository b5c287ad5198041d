"""apex's first FusedSGD: gradients and outputs as arguments of ``step``."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT, required

from apex import optimizers
from apex.contrib.optimizers.explicit import ExplicitOptimizer


class FusedSGD(ExplicitOptimizer, optimizers.FusedSGD):
    """SGD with momentum; uses the parameters' own gradients unless others are passed."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = required,  # type: ignore[assignment]
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
    ) -> None:
        """Creates the optimizer; see :class:`apex.optimizers.FusedSGD`."""
        optimizers.FusedSGD.__init__(
            self,
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            wd_after_momentum=wd_after_momentum,
            materialize_master_grads=materialize_master_grads,
        )
