"""Adam and AdamW on torch's fused kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

import amp_C
from apex._core.dtypes import LOW_PRECISION
from apex._core.foreach.adam import AdamRule, adam_
from apex._core.foreach.gate import Gate, Scalar
from apex.optimizers.fused_optimizer import (
    Batch,
    FusedOptimizer,
    check_adam_options,
    refuse_amsgrad,
    write_back,
)

_CLIPPING = (
    "Clip before the step: torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), "
    "max_norm). apex.contrib.optimizers.FusedAdam still takes it."
)
_LEGACY = {
    "max_grad_norm": _CLIPPING,
    "eps_inside_sqrt": "apex.contrib.optimizers.FusedAdam still takes it.",
    "use_mt": "Leave it out: all parameters are stepped together.",
    "amp_scale_adjustment": "Leave it out: amp unscales gradients before the step.",
}


class FusedAdam(FusedOptimizer):
    """AdamW, or Adam with ``adam_w_mode=False``.

    16-bit parameters are stepped in fp32 with fp32 state and rounded once.

    Attributes:
        adam_w_mode: 1 for decoupled weight decay, else 0.
        capturable: Whether learning rate and step count live on the device.
        master_weights: Whether 16-bit parameters get fp32 masters, kept in the state.
    """

    steps_dtensors = True
    settings: ClassVar[tuple[str, ...]] = ("adam_w_mode", "capturable", "master_weights")

    multi_tensor_adam = staticmethod(amp_C.multi_tensor_adam)
    multi_tensor_adam_capturable = staticmethod(amp_C.multi_tensor_adam_capturable)
    multi_tensor_adam_capturable_master = staticmethod(amp_C.multi_tensor_adam_capturable_master)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        **legacy: Any,
    ) -> None:
        """Makes the optimizer.

        Args:
            params: Parameters or groups.
            lr: Learning rate.
            bias_correction: Whether averages are divided by their bias.
            betas: Decay of the averages of gradients and of their squares, per step.
            eps: Added to the denominator.
            adam_w_mode: Whether weight decay is decoupled (AdamW).
            weight_decay: Decay rate.
            amsgrad: Refused.
            set_grad_none: Whether ``zero_grad`` drops gradients.
            capturable: Whether learning rate and step count are device tensors, so that a step
                can be captured in a CUDA graph.
            master_weights: Whether 16-bit parameters get fp32 masters; needs ``capturable``.
            legacy: Arguments of apex's first FusedAdam; each is refused with its remedy.

        Raises:
            RuntimeError: For ``amsgrad``, or masters without ``capturable``.
            TypeError: For an unknown or retired argument.
            ValueError: For a value outside its range.
        """
        _refuse_legacy(legacy)
        refuse_amsgrad("FusedAdam", amsgrad)
        if master_weights and not capturable:
            raise RuntimeError(
                "FusedAdam keeps master weights only with capturable=True. Pass that too, or let "
                'amp.initialize(..., opt_level="O2") keep them.'
            )
        check_adam_options(lr, betas, eps, weight_decay)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none
        self.capturable = capturable
        self.master_weights = master_weights
        if capturable:
            for group in self.param_groups:
                put_on_device(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group."""
        super().add_param_group(param_group)
        if getattr(self, "capturable", False):
            put_on_device(self.param_groups[-1])

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        **scaling: Any,
    ) -> Any:
        """Takes one step.

        Args:
            closure: Recomputes the loss; called once, before the step.
            grads: Refused, as are the next three: arguments of apex's first FusedAdam.
            output_params: Refused.
            scale: Refused.
            grad_norms: Refused.
            scaling: ``grad_scaler``, a ``torch.amp.GradScaler`` whose scaled gradients these are.

        Raises:
            RuntimeError: For one of the four.
        """
        retired = {
            "grads": grads,
            "output_params": output_params,
            "scale": scale,
            "grad_norms": grad_norms,
        }
        given = [name for name, value in retired.items() if value is not None]
        if given:
            raise RuntimeError(
                f"FusedAdam.step no longer takes {', '.join(given)}. Make it like "
                "torch.optim.AdamW, let amp.scale_loss unscale the gradients, and call step() "
                "without arguments; apex.contrib.optimizers.FusedAdam still takes them."
            )
        return super().step(closure, **scaling)

    def update(self, batch: Batch, step: Scalar, gate: Gate) -> None:
        """Takes one step for a batch."""
        beta1, beta2 = batch.group["betas"]
        rule = AdamRule(
            lr=batch.option("lr"),
            beta1=beta1,
            beta2=beta2,
            eps=batch.group["eps"],
            weight_decay=batch.group["weight_decay"],
            decoupled=bool(self.adam_w_mode),
            bias_correction=bool(batch.group["bias_correction"]),
        )
        targets = self.masters(batch, LOW_PRECISION if self.master_weights else ())
        averages = self.buffers(batch, "exp_avg"), self.buffers(batch, "exp_avg_sq")
        adam_(targets, batch.grads, *averages, rule=rule, step=step, gate=gate)
        write_back(batch.params, targets)


def put_on_device(group: dict[str, Any]) -> None:
    """Makes the learning rate and the step count of a group tensors beside its parameters."""
    if not group["params"]:
        return
    device = group["params"][0].device
    group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(device, copy=True)
    step = torch.as_tensor(group.get("step", 0), dtype=torch.int32)
    group["step"] = step.to(device, copy=True)


def _refuse_legacy(legacy: dict[str, Any]) -> None:
    for name in legacy:
        if name not in _LEGACY:
            raise TypeError(f"FusedAdam got an unexpected keyword argument {name!r}.")
        raise TypeError(f"FusedAdam no longer takes {name}. {_LEGACY[name]}")
