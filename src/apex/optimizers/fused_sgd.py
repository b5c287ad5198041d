"""SGD with momentum, with torch's fused kernel."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT, required

import amp_C
from apex._core.arguments import flag, in_range
from apex._optimizer_rules.sgd import SGDRule, sgd_
from apex.optimizers.fused_optimizer import Batch, FusedOptimizer

BUFFER = "momentum_buffer"


class FusedSGD(FusedOptimizer):
    """Stochastic gradient descent with torch's rules for momentum and Nesterov momentum.

    Momentum of fp16 parameters is fp16, as in apex and torch. Momentum of bf16 parameters, which
    apex did not support, is fp32.

    Attributes:
        wd_after_momentum: Whether to add weight decay after the momentum.
        materialize_master_grads: Has no effect; kept for compatibility.
    """

    gradients_in_kernels = True

    multi_tensor_sgd = staticmethod(amp_C.multi_tensor_sgd)

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
        set_grad_none: bool = False,
    ) -> None:
        """Creates the optimizer.

        Args:
            params: Parameters or parameter groups.
            lr: Learning rate; required here or in every group.
            momentum: Decay of the momentum per step; 0 for none.
            dampening: Share of the gradient that does not enter the momentum.
            weight_decay: Decay rate.
            nesterov: Whether to use Nesterov momentum.
            wd_after_momentum: Whether to add weight decay after the momentum.
            materialize_master_grads: Has no effect.
            set_grad_none: Whether ``zero_grad`` sets gradients to None.

        Raises:
            TypeError: If a value is not a number.
            ValueError: If a value is out of range, or Nesterov momentum has no momentum.
        """
        if not isinstance(lr, type(required)):
            in_range("lr", lr)
        in_range("momentum", momentum)
        in_range("weight_decay", weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"nesterov=True got momentum={momentum} and dampening={dampening}; it needs a "
                "momentum above 0 and no dampening."
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, set_grad_none)
        self.wd_after_momentum = flag("wd_after_momentum", wd_after_momentum)
        self.materialize_master_grads = flag("materialize_master_grads", materialize_master_grads)

    def state_dtype(self, param: Tensor) -> torch.dtype:
        """Returns the dtype of a parameter's momentum."""
        if param.dtype is torch.float16:
            return torch.float16
        return super().state_dtype(param)

    def get_momentums(self, params: Iterable[Tensor]) -> tuple[list[Tensor], bool]:
        """Returns each parameter's momentum, and whether this call created all of it, as zeros."""
        params = list(params)
        new = all(BUFFER not in self.state[param] for param in params)
        return self.buffers(params, BUFFER), new

    def update(self, batch: Batch) -> None:
        """Takes one step for a batch of parameters."""
        group = batch.group
        rule = SGDRule(
            lr=batch.option("lr"),
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            decay_after_momentum=self.wd_after_momentum,
        )
        first_run = False
        if rule.momentum and rule.dampening:  # without dampening, a start from zeros is the same
            first_run = not any(BUFFER in self.state[param] for param in batch.params)
        if first_run and batch.skip is not None:
            is_skipped = bool(batch.skip)  # sync: a skipped step must not count as the first run
            if is_skipped:
                return
        buffers = self.buffers(batch.params, BUFFER) if rule.momentum else []
        sgd_(batch.grads, batch.params, buffers, rule, batch.skip, first_run=first_run)
