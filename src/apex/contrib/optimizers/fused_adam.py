"""apex's first FusedAdam: clips, and takes gradients and outputs as arguments of ``step``."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from apex._core.foreach.adam import adam_, corrected_rate
from apex._core.foreach.gate import Gate, Scalar, as_tensor
from apex._core.foreach.norms import l2_norms, stacked, total
from apex._core.foreach.working import working
from apex._torch.copies import moved
from apex.contrib.optimizers.explicit import ExplicitOptimizer
from apex.optimizers.fused_optimizer import Batch, check_adam_options, check_range


class FusedAdam(ExplicitOptimizer):
    """Adam with decoupled weight decay, as in apex's first version.

    Bias correction applies to the step size, ``lr * sqrt(1 - beta2**t) / (1 - beta1**t)``, and thus
    to weight decay, too.

    Attributes:
        eps_mode: 0 if ``eps`` is added inside the square root, 1 if outside.
    """

    settings: ClassVar[tuple[str, ...]] = ("eps_mode",)

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
            params: Parameters or groups.
            lr: Learning rate.
            bias_correction: Whether to correct the bias of the averages in the step size.
            betas: Decay of the averages of gradients and of their squares, per step.
            eps: Added to the denominator.
            eps_inside_sqrt: Whether to add ``eps`` inside the square root.
            weight_decay: Decay rate.
            max_grad_norm: Greatest norm of a group's gradients; 0 for no clipping.
            amsgrad: Not supported.
            use_mt: Ignored: all parameters are always stepped together.
            amp_scale_adjustment: Must be 1: amp unscales gradients before the step.

        Raises:
            RuntimeError: For ``amsgrad``.
            ValueError: For a value out of range.
        """
        del use_mt
        check_adam_options("FusedAdam", lr, betas, eps, weight_decay, amsgrad=amsgrad)
        check_range("max_grad_norm", max_grad_norm)
        if amp_scale_adjustment != 1.0:
            raise ValueError(
                f"amp_scale_adjustment is {amp_scale_adjustment!r}; it must be 1, because amp "
                "unscales gradients before the step."
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults)
        self.eps_mode = 0 if eps_inside_sqrt else 1

    def prepare(self, batches: list[Batch]) -> None:
        """Clips each group's gradients by their norm."""
        for index, group in enumerate(self.param_groups):
            own = [batch for batch in batches if batch.group is group]
            if own and group["max_grad_norm"] > 0:
                known = None if self._norms is None else self._norms[index]
                _clip(own, group["max_grad_norm"], known)

    def update(self, batch: Batch, step: Scalar, gate: Gate) -> None:
        """Takes one step for a batch."""
        group, lr = batch.group, batch.option("lr")
        rule = replace(
            batch.adam_rule(decoupled=1),
            lr=corrected_rate(lr, group["betas"], step) if group["bias_correction"] else lr,
            bias_correction=False,
            eps_inside_sqrt=self.eps_mode == 0,
        )
        averages = self.buffers(batch, "exp_avg"), self.buffers(batch, "exp_avg_sq")
        adam_(batch.params, batch.grads, *averages, rule=rule, step=step, gate=gate)


def _clip(batches: list[Batch], max_norm: float, known: float | Tensor | None) -> None:
    device = batches[0].device
    if known is None:
        norm = total(torch.cat([stacked(l2_norms(batch.grads), device) for batch in batches]))
    else:
        norm = as_tensor(known, device)
    divisor = ((norm + 1e-6) / max_norm).clamp(min=1.0)
    for batch in batches:
        (wide,) = working(batch.grads)
        batch.grads = list(torch._foreach_div(wide, moved(divisor, batch.device)))
