"""LAMB with fp32 masters for 16-bit parameters, entirely on the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

import amp_C
from apex.optimizers.fused_lamb import FusedLAMB
from apex.optimizers.fused_optimizer import put_on_device


class FusedMixedPrecisionLamb(FusedLAMB):
    """LAMB for 16-bit models without amp, with masters in the state and scalars on the device.

    Attributes:
        reduced_precision_dtype: Dtype of the parameters that get fp32 masters.
    """

    capturable = True

    # apex's name. This function takes other arguments than the base class's function.
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
        """Creates the optimizer after ``step`` steps.

        Parameters of ``reduced_precision_dtype`` get fp32 masters. For other arguments and errors,
        see :class:`apex.optimizers.FusedLAMB`.
        """
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adam_w_mode,
            grad_averaging,
            max_grad_norm=max_grad_norm,
            use_nvlamb=use_nvlamb,
        )
        self.defaults["step"] = step
        self.reduced_precision_dtype = reduced_precision_dtype
        for group in self.param_groups:
            group["step"] = step
            put_on_device(group)
