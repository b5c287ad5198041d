"""Adam and AdamW with torch's fused kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

import amp_C
from apex._core.arguments import flag, in_range
from apex._core.dtypes import LOW_PRECISION, math_dtype
from apex._core.foreach.norms import global_norm
from apex._optimizer_rules.adam import AdamRule, adam_
from apex._optimizer_rules.working import store
from apex._torch.copies import as_tensor, moved
from apex.optimizers.fused_optimizer import Batch, FusedOptimizer, gradients_of


class FusedAdam(FusedOptimizer):
    """AdamW, or Adam with ``adam_w_mode=False``.

    Updates 16-bit parameters in fp32, with fp32 state, and rounds once.

    Attributes:
        adam_w_mode: 1 for decoupled weight decay, else 0.
        eps_mode: 0 if ``eps`` is added inside the square root, 1 if outside.
        capturable: Whether learning rate and step count are on the device.
        master_weights: Whether 16-bit parameters have fp32 masters in the state.
    """

    # Defaults for optimizers in files of earlier releases, which lack these attributes.
    adam_w_mode = 1
    eps_mode = 1
    master_weights = False

    steps_dtensors = True
    gradients_in_kernels = True

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
        *,
        max_grad_norm: float = 0.0,
        eps_inside_sqrt: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        """Creates the optimizer.

        Args:
            params: Parameters or parameter groups.
            lr: Learning rate.
            bias_correction: Whether to correct the bias of the averages.
            betas: Decay of the averages of gradients and of their squares, per step.
            eps: Term added to the denominator.
            adam_w_mode: Whether weight decay is decoupled (AdamW).
            weight_decay: Decay rate.
            amsgrad: Not supported; must be False.
            set_grad_none: Whether ``zero_grad`` sets gradients to None.
            capturable: Whether learning rate and step count are device tensors, so that a step
                can be captured in a CUDA graph.
            master_weights: Whether 16-bit parameters get fp32 masters; needs ``capturable``.
            max_grad_norm: Greatest norm of a group's gradients; 0 for no clipping. This argument
                and the next three are from apex's first FusedAdam.
            eps_inside_sqrt: Whether to add ``eps`` inside the square root.
            use_mt: Ignored: all parameters are always updated together.
            amp_scale_adjustment: Must be 1: amp unscales gradients before the step.

        Raises:
            RuntimeError: If ``amsgrad`` is set, or ``master_weights`` without ``capturable``.
            ValueError: If a value is out of range.
        """
        if master_weights and not capturable:
            raise RuntimeError(
                "FusedAdam supports master_weights=True only with capturable=True. Pass both, or "
                'use the masters of amp.initialize(..., opt_level="O2").'
            )
        defaults = self.adam_defaults(lr, bias_correction, betas, eps, weight_decay, amsgrad)
        in_range("max_grad_norm", max_grad_norm)
        defaults["max_grad_norm"] = max_grad_norm
        if amp_scale_adjustment != 1.0:
            raise ValueError(
                f"amp_scale_adjustment is {amp_scale_adjustment!r}; it must be 1, because amp "
                "unscales gradients before the step."
            )
        # Before the base's constructor, which calls add_param_group, which reads it.
        self.capturable = flag("capturable", capturable)
        super().__init__(params, defaults, set_grad_none)
        self.adam_w_mode = int(flag("adam_w_mode", adam_w_mode))
        # apex's number: 0 adds eps inside the square root, 1 outside.
        self.eps_mode = int(not flag("eps_inside_sqrt", eps_inside_sqrt))
        self.master_weights = flag("master_weights", master_weights)

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
            grads: Not supported. This argument and the next three are from apex's first FusedAdam.
            output_params: Not supported.
            scale: Not supported.
            grad_norms: Not supported.
            **scaling: ``grad_scaler``, the ``torch.amp.GradScaler`` that scaled the gradients, for
                a call without ``GradScaler.step``.

        Raises:
            RuntimeError: If an unsupported argument is given.
        """
        if any(value is not None for value in (grads, output_params, scale, grad_norms)):
            raise RuntimeError(
                "FusedAdam.step no longer takes grads, output_params, scale and grad_norms. Create "
                "it like torch.optim.AdamW, let amp.scale_loss unscale the gradients, and call "
                "step() without arguments; apex.contrib.optimizers.FusedAdam still accepts them."
            )
        return super().step(closure, **scaling)

    def prepare(self, batches: list[Batch]) -> None:
        """Clips the gradients of each group that has a greatest norm."""
        for index, group in enumerate(self.param_groups):
            largest = float(group.get("max_grad_norm", 0.0))  # later releases of apex have none
            if not largest:
                continue
            own_batches = [batch for batch in batches if batch.group is group]
            if not own_batches:
                continue
            if self._norms is None:
                norm = global_norm(gradients_of(own_batches))
            else:
                norm = as_tensor(self._norms[index], own_batches[0].device)
            ratio = (norm + 1e-6) / largest
            divisor = ratio.clamp(min=1.0)
            for batch in own_batches:
                wide = [grad.to(math_dtype(grad)) for grad in batch.grads]
                clipped = torch._foreach_div(wide, moved(divisor, batch.device))
                batch.grads = list(clipped)

    def update(self, batch: Batch) -> None:
        """Takes one step for a batch of parameters."""
        dtypes = LOW_PRECISION if self.master_weights else ()
        targets = self.masters(batch, dtypes)
        adam_(
            batch.grads,
            targets,
            self.buffers(batch.params, "exp_avg"),
            self.buffers(batch.params, "exp_avg_sq"),
            self.rule(batch),
            batch.step,
            batch.skip,
        )
        store(batch.params, targets)

    def rule(self, batch: Batch) -> AdamRule:
        """Returns the hyperparameters of a batch's step."""
        return batch.adam_rule(self.adam_w_mode, eps_inside_sqrt=self.eps_mode == 0)

    _norms: list[Any] | None = None
    """The norm of each group's gradients, if the caller of ``step`` passes them."""
