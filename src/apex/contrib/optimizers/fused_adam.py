"""apex's first FusedAdam: clips, and takes gradients and outputs as arguments of ``step``."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.optim.optimizer import ParamsT

from apex import optimizers
from apex._optimizer_rules.adam import AdamRule, corrected_rate
from apex.contrib.optimizers.explicit import ExplicitOptimizer
from apex.optimizers.fused_optimizer import Batch


class FusedAdam(ExplicitOptimizer, optimizers.FusedAdam):  # type: ignore[misc]
    """Adam with decoupled weight decay, as in apex's first version.

    Bias correction applies to the step size, ``lr * sqrt(1 - beta2**t) / (1 - beta1**t)``, and thus
    also to weight decay.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        """Creates the optimizer.

        Args:
            params: Parameters or parameter groups.
            lr: Learning rate.
            bias_correction: Whether to correct the bias of the averages in the step size.
            betas: Decay of the averages of gradients and of their squares, per step.
            eps: Term added to the denominator.
            eps_inside_sqrt: Whether to add ``eps`` inside the square root.
            weight_decay: Decay rate.
            max_grad_norm: Greatest norm of a group's gradients; 0 for no clipping.
            amsgrad: Not supported; must be False.
            use_mt: Ignored: all parameters are always updated together.
            amp_scale_adjustment: Must be 1: amp unscales gradients before the step.

        Raises:
            RuntimeError: If ``amsgrad`` is set.
            ValueError: If a value is out of range.
        """
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            amp_scale_adjustment=amp_scale_adjustment,
            max_grad_norm=max_grad_norm,
            eps_inside_sqrt=eps_inside_sqrt,
        )

    def rule(self, batch: Batch) -> AdamRule:
        """Returns the hyperparameters of a batch's step."""
        rule = super().rule(batch)
        if not rule.bias_correction:
            return rule
        rate = corrected_rate(rule.lr, rule.betas, batch.step)
        return replace(rule, lr=rate, bias_correction=False)
