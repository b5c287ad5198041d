"""Layer-wise adaptive rate control: a separate learning rate per layer, around any optimizer.

Source: You et al., "Large Batch Training of Convolutional Networks", arXiv:1708.03888.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from apex._core import arguments
from apex._engine.optimizer.subclass import prepared_state
from apex.fp16_utils.master_wrapper import forwarded


class LARC:
    """Wraps an optimizer and scales every gradient by its layer's trust ratio before the step.

    Other attributes, such as ``zero_grad`` and ``state_dict``, come from the optimizer.

    The local rate of a parameter ``w`` with gradient ``g`` is
    ``trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)``. With ``clip``, the step uses the
    smaller of the local and the group's learning rate; without it, their product. Weight decay is
    added to the gradient before scaling. There is no host sync.

    Attributes:
        optim: The wrapped optimizer.
        param_groups, state: The attributes of the optimizer.
        trust_coefficient: Factor on the ratio of norms.
        clip: Whether the group's learning rate limits the local rate.
        eps: Term added to the denominator.
    """

    # Makes GradScaler unscale, or skip, before `step`: the ratios need unscaled gradients.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        """Wraps ``optimizer``.

        Raises:
            TypeError: If ``optimizer`` is not a ``torch.optim.Optimizer``, or an argument has the
                wrong type.
            ValueError: If ``trust_coefficient`` or ``eps`` is below 0.
        """
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"LARC got {arguments.kind(optimizer)}; it wraps a torch.optim.Optimizer."
            )
        arguments.in_range("trust_coefficient", trust_coefficient)
        arguments.in_range("eps", eps)
        self.clip = arguments.flag("clip", clip)
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.eps = eps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scales the gradients and calls the optimizer's ``step``.

        A closure computes gradients inside the step; each of its evaluations is scaled.
        """
        groups = self.optim.param_groups
        decays = [group.get("weight_decay", 0.0) for group in groups]

        def scaled() -> Any:
            loss = None if closure is None else closure()
            self._scale_gradients(decays)
            return loss

        try:
            for group in groups:  # the scaled gradients already include weight decay
                group["weight_decay"] = 0.0
            if closure is not None:
                return self.optim.step(scaled)
            scaled()
            return self.optim.step()
        finally:
            for group, decay in zip(groups, decays, strict=True):
                group["weight_decay"] = decay

    @torch.no_grad()
    def _scale_gradients(self, decays: list[float]) -> None:
        """Adds each group's weight decay to the gradients and multiplies them by their rate."""
        prepared = prepared_state(self.optim)
        if prepared is not None:
            prepared.update_masters_with_grads()
        for group, decay in zip(self.optim.param_groups, decays, strict=True):
            for param in group["params"]:
                grad = param.grad
                if grad is None:
                    continue
                param_norm = param.norm()
                grad_norm = grad.norm()
                denominator = grad_norm + decay * param_norm + self.eps
                rate = self.trust_coefficient * param_norm / denominator
                if self.clip:
                    rate = (rate / group["lr"]).clamp(max=1.0)
                adapts = (param_norm != 0) & (grad_norm != 0)
                # A layer with a zero norm keeps its unscaled gradient, without weight decay.
                layer_decay = torch.where(adapts, decay, 0.0)
                factor = torch.where(adapts, rate, 1.0)
                grad.add_(param * layer_decay)
                grad.mul_(factor)

    # -- forwarded to the optimizer ----------------------------------------------------------

    param_groups = forwarded("optim", "param_groups")
    state = forwarded("optim", "state")

    def __getattr__(self, name: str) -> Any:
        """Returns the optimizer's attribute ``name``, such as ``zero_grad`` or ``_amp_stash``."""
        # Python 3.10 would copy LARC by the ``__getstate__`` of the optimizer.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return repr(self.optim)
