"""LAMB with fp32 masters of 16-bit parameters, all on the device."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

import amp_C
from apex.optimizers.fused_adam import put_on_device
from apex.optimizers.fused_lamb import FusedLAMB


class FusedMixedPrecisionLamb(FusedLAMB):
    """LAMB for models in 16 bits, without amp: masters in the state, scalars on the device.

    Attributes:
        reduced_precision_dtype: The dtype of the parameters that get fp32 masters.
    """

    settings: ClassVar[tuple[str, ...]] = (*FusedLAMB.settings, "reduced_precision_dtype")

    multi_tensor_l2norm = staticmethod(amp_C.multi_tensor_l2norm_mp)
    # By apex's name, with other arguments than the base class's function has.
    multi_tensor_lamb = staticmethod(amp_C.multi_tensor_lamb_mp)  # type: ignore[assignment]

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        """Makes the optimizer.

        Args:
            params: Parameters or groups.
            lr: Learning rate.
            step: Steps that were taken before.
            bias_correction: Whether averages are divided by their bias.
            betas: Decay of the averages of gradients and of their squares, per step.
            eps: Added to the denominator.
            weight_decay: Decay rate.
            amsgrad: Refused.
            adam_w_mode: Whether weight decay is decoupled.
            grad_averaging: Whether the gradient enters its average by ``1 - betas[0]`` or by 1.
            max_grad_norm: Greatest global gradient norm; 0 for no clipping.
            use_nvlamb: Whether tensors without weight decay get a trust ratio, too.
            reduced_precision_dtype: The dtype of the parameters that get fp32 masters.

        Raises:
            RuntimeError: For ``amsgrad``.
            ValueError: For a value outside its range.
        """
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            adam_w_mode=adam_w_mode,
            grad_averaging=grad_averaging,
            max_grad_norm=max_grad_norm,
            use_nvlamb=use_nvlamb,
        )
        self.defaults["step"] = step
        self.reduced_precision_dtype = reduced_precision_dtype
        for group in self.param_groups:
            group["step"] = step
            put_on_device(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group."""
        super().add_param_group(param_group)
        put_on_device(self.param_groups[-1])

    def _reduced(self) -> tuple[torch.dtype, ...]:
        return () if self.reduced_precision_dtype is None else (self.reduced_precision_dtype,)
