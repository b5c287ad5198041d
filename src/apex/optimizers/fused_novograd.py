"""NovoGrad with foreach kernels."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT

import amp_C
from apex._core.arguments import flag
from apex._core.foreach.norms import stacked
from apex._optimizer_rules.novograd import NORMS, NOT_STARTED, novograd_
from apex._optimizer_rules.working import store
from apex._torch.copies import as_tensor
from apex.optimizers.fused_optimizer import Batch, FusedOptimizer

NORM = "exp_avg_sq"
"""State key of a running norm, 0-d. apex chose the name, although it is not a square."""


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad: Adam with one running gradient norm per tensor as its denominator.

    Attributes:
        moment_mode: Whether the gradient is normalized and decayed before averaging (0) or after
            (1).
    """

    scalar_state = ("step", NORM)

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
        """Creates the optimizer.

        Args:
            params: Parameters or parameter groups.
            lr: Learning rate.
            bias_correction: Whether to correct the bias of the averages.
            betas: Decay of the averages of gradients and of their norms, per step.
            eps: Term added to the denominator.
            weight_decay: Decay rate.
            amsgrad: Not supported; must be False.
            reg_inside_moment: Whether to normalize and decay the gradient before averaging.
            grad_averaging: Whether the weight of the gradient in its average is ``1 - betas[0]``,
                instead of 1.
            norm_type: 2 for the 2-norm, 0 for the largest absolute value.
            init_zero: Whether the running norm starts at 0 instead of the first norm.
            set_grad_none: Whether ``zero_grad`` sets gradients to None.

        Raises:
            RuntimeError: If ``amsgrad`` is set or ``norm_type`` is invalid.
            ValueError: If a value is out of range.
        """
        defaults = self.adam_defaults(lr, bias_correction, betas, eps, weight_decay, amsgrad)
        if norm_type not in NORMS:
            raise RuntimeError(
                f"FusedNovoGrad got norm_type={norm_type!r}; it must be 2 (2-norm) or 0 "
                "(largest absolute value)."
            )
        defaults["grad_averaging"] = grad_averaging
        defaults["norm_type"] = norm_type
        defaults["init_zero"] = init_zero
        super().__init__(params, defaults, set_grad_none)
        # apex's number: 0 adds weight decay inside the moment, 1 applies it to the parameter.
        self.moment_mode = int(not flag("reg_inside_moment", reg_inside_moment))

    def update(self, batch: Batch) -> None:
        """Takes one step for a batch of parameters."""
        start = 0.0 if batch.group["init_zero"] else NOT_STARTED
        running = []
        for param in batch.params:
            state = self.state[param]
            if NORM not in state:
                state[NORM] = as_tensor(start, param.device)
            running.append(state[NORM])
        norms = stacked(running, batch.device)
        novograd_(
            batch.grads,
            batch.params,
            self.buffers(batch.params, "exp_avg"),
            norms,
            batch.adam_rule(self.moment_mode),
            batch.step,
            batch.skip,
            norm_type=batch.group["norm_type"],
        )
        store(running, norms.unbind())
