"""Adagrad with foreach kernels."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT

import amp_C
from apex._core.arguments import flag, in_range
from apex._optimizer_rules.adagrad import adagrad_
from apex.optimizers.fused_optimizer import Batch, FusedOptimizer


class FusedAdagrad(FusedOptimizer):
    """Adagrad with coupled or decoupled weight decay.

    Attributes:
        adagrad_w_mode: 1 for decoupled weight decay, else 0.
    """

    multi_tensor_adagrad = staticmethod(amp_C.multi_tensor_adagrad)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        """Creates the optimizer.

        Args:
            params: Parameters or parameter groups.
            lr: Learning rate.
            eps: Term added to the denominator.
            weight_decay: Decay rate.
            set_grad_none: Whether ``zero_grad`` sets gradients to None.
            adagrad_w_mode: Whether weight decay is decoupled.

        Raises:
            ValueError: If a value is out of range.
        """
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        for name, value in defaults.items():
            in_range(name, value)
        super().__init__(params, defaults, set_grad_none)
        self.adagrad_w_mode = int(flag("adagrad_w_mode", adagrad_w_mode))

    def update(self, batch: Batch) -> None:
        """Takes one step for a batch of parameters."""
        adagrad_(
            batch.grads,
            batch.params,
            self.buffers(batch.params, "sum"),
            batch.skip,
            lr=batch.option("lr"),
            eps=batch.group["eps"],
            weight_decay=batch.group["weight_decay"],
            decoupled=bool(self.adagrad_w_mode),
        )
