"""NovoGrad on foreach kernels."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

import amp_C
from apex._core.foreach.gate import Gate, Scalar
from apex._core.foreach.norms import stacked
from apex._core.foreach.novograd import (
    L2_NORM,
    MAX_NORM,
    NovoGradRule,
    blended,
    norms_of,
    novograd_,
)
from apex.optimizers.fused_optimizer import (
    Batch,
    FusedOptimizer,
    check_adam_options,
    refuse_amsgrad,
)

NORM = "exp_avg_sq"
"""The state key of a running norm, 0-d; the name is apex's, though it is no square."""

_NOT_STARTED = -1.0


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad: Adam with one running gradient norm per tensor as its denominator.

    Attributes:
        moment_mode: 0 to normalize and decay the gradient before it is averaged, 1 behind.
    """

    settings: ClassVar[tuple[str, ...]] = ("moment_mode",)

    multi_tensor_novograd = staticmethod(amp_C.multi_tensor_novograd)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        """Makes the optimizer.

        Args:
            params: Parameters or groups.
            lr: Learning rate.
            bias_correction: Whether averages are divided by their bias.
            betas: Decay of the averages of gradients and of their norms, per step.
            eps: Added to the denominator.
            weight_decay: Decay rate.
            amsgrad: Refused.
            reg_inside_moment: Whether the gradient is normalized and decayed before it is
                averaged.
            grad_averaging: Whether the gradient enters its average by ``1 - betas[0]`` or by 1.
            norm_type: 2 for the 2-norm, 0 for the greatest absolute value.
            init_zero: Whether the running norm starts as 0, not as the first norm.
            set_grad_none: Whether ``zero_grad`` drops gradients.

        Raises:
            RuntimeError: For ``amsgrad`` or another norm.
            ValueError: For a value outside its range.
        """
        refuse_amsgrad("FusedNovoGrad", amsgrad)
        check_adam_options(lr, betas, eps, weight_decay)
        if norm_type not in (MAX_NORM, L2_NORM):
            raise RuntimeError(
                f"FusedNovoGrad got norm_type={norm_type!r}; it must be 2 (2-norm) or 0 "
                "(greatest absolute value)."
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults)
        self.moment_mode = 0 if reg_inside_moment else 1
        self.set_grad_none = set_grad_none

    def update(self, batch: Batch, step: Scalar, gate: Gate) -> None:
        """Takes one step for a batch."""
        group = batch.group
        beta1, beta2 = group["betas"]
        rule = NovoGradRule(
            lr=batch.option("lr"),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            bias_correction=bool(group["bias_correction"]),
            averaged=bool(group["grad_averaging"]),
            inside_moment=self.moment_mode == 0,
            norm_type=group["norm_type"],
        )
        norms = self._blend(batch, rule, gate)
        averages = self.buffers(batch, "exp_avg")
        novograd_(batch.params, batch.grads, averages, norms, rule=rule, step=step, gate=gate)

    def _blend(self, batch: Batch, rule: NovoGradRule, gate: Gate) -> Tensor:
        """Blends this step's gradient norms into the running ones: ``[N]``."""
        states = [self._norm(param, batch.group["init_zero"]) for param in batch.params]
        running = stacked(states, batch.device)
        fresh = norms_of(batch.grads, rule.norm_type, batch.device)
        started = torch.where(running == _NOT_STARTED, fresh, running)
        (chosen,) = gate.select([running], [blended(started, fresh, rule)])
        torch._foreach_copy_(states, list(chosen.unbind()))
        return chosen

    def _norm(self, param: Tensor, init_zero: bool) -> Tensor:
        state = self.state[param]
        if NORM not in state:
            start = 0.0 if init_zero else _NOT_STARTED
            state[NORM] = torch.full((), start, device=param.device)
        norm: Tensor = state[NORM]
        return norm
