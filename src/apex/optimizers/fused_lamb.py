"""LAMB on foreach kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

import amp_C
from apex._core.arguments import flag, in_range
from apex._core.foreach.norms import global_norm
from apex._optimizer_rules.lamb import clip_divisor, lamb_
from apex._optimizer_rules.working import store
from apex._torch.copies import as_tensor
from apex.optimizers.fused_optimizer import Batch, FusedOptimizer, gradients_of


class FusedLAMB(FusedOptimizer):
    """LAMB: clips gradients to one global norm, and scales the learning rate of each tensor.

    Attributes:
        adam_w_mode: 1 for decoupled weight decay, else 0.
        use_nvlamb: Whether tensors without weight decay also get a trust ratio.
    """

    steps_dtensors = True
    reduced_precision_dtype: torch.dtype | None = None

    multi_tensor_l2norm = staticmethod(amp_C.multi_tensor_l2norm)
    multi_tensor_lamb = staticmethod(amp_C.multi_tensor_lamb)

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
        use_nvlamb: bool = False,
    ) -> None:
        """Creates the optimizer.

        Args:
            params: Parameters or parameter groups.
            lr: Learning rate.
            bias_correction: Whether to correct the bias of the averages.
            betas: Decay of the averages of gradients and of their squares, per step.
            eps: Term added to the denominator.
            weight_decay: Decay rate.
            amsgrad: Not supported; must be False.
            adam_w_mode: Whether weight decay is decoupled.
            grad_averaging: Whether the weight of the gradient in its average is ``1 - betas[0]``,
                instead of 1.
            set_grad_none: Whether ``zero_grad`` sets gradients to None.
            max_grad_norm: Greatest global gradient norm; 0 for no clipping.
            use_nvlamb: Whether tensors without weight decay also get a trust ratio.

        Raises:
            RuntimeError: If ``amsgrad`` is set.
            ValueError: If a value is out of range.
        """
        defaults = self.adam_defaults(lr, bias_correction, betas, eps, weight_decay, amsgrad)
        in_range("max_grad_norm", max_grad_norm)
        defaults["grad_averaging"] = grad_averaging
        defaults["max_grad_norm"] = max_grad_norm
        super().__init__(params, defaults, set_grad_none)
        self.adam_w_mode = int(flag("adam_w_mode", adam_w_mode))
        self.use_nvlamb = flag("use_nvlamb", use_nvlamb)

    def prepare(self, batches: list[Batch]) -> None:
        """Computes the divisor of all gradients from their global norm."""
        largest = self.defaults["max_grad_norm"]
        self._divisor: float | Tensor = 1.0
        if largest:
            norm = global_norm(gradients_of(batches))
            self._divisor = clip_divisor(norm, largest)

    def update(self, batch: Batch) -> None:
        """Takes one step for a batch of parameters."""
        targets = self.masters(batch, (self.reduced_precision_dtype,))
        lamb_(
            batch.grads,
            targets,
            self.buffers(batch.params, "exp_avg"),
            self.buffers(batch.params, "exp_avg_sq"),
            batch.adam_rule(self.adam_w_mode),
            batch.step,
            batch.skip,
            divisor=as_tensor(self._divisor, batch.device),
            nvlamb=self.use_nvlamb,
        )
        store(batch.params, targets)
