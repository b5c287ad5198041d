"""apex's first FusedLAMB: like the current one, but without ``use_nvlamb``."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT

from apex import optimizers


class FusedLAMB(optimizers.FusedLAMB):
    """LAMB without a trust ratio for tensors without weight decay."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
    ) -> None:
        """Creates the optimizer; see :class:`apex.optimizers.FusedLAMB`."""
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
            set_grad_none=set_grad_none,
            max_grad_norm=max_grad_norm,
        )
