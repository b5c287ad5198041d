"""Averages gradients over processes when the script requests it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from apex.parallel.flat_calls import extract_tensors, flat_dist_call
from apex.parallel.gradient_reduction import GradientReduction, reduce_gradients
from apex.parallel.process_groups import require_running


class Reducer:
    """Averages gradients over all processes at each call of ``reduce``.

    For a module, the constructor also broadcasts rank 0's parameters to all processes. For
    gradients, the script must do so itself.

    Attributes:
        module: The module, or ``None``.
        grads: The gradients, if there is no module.
    """

    def __init__(self, module_or_grads_list: Any) -> None:
        """Accepts a module, or gradients in nested iterables.

        Raises:
            RuntimeError: If torch.distributed is not initialized.
            TypeError: If the argument is not a module and contains no tensor.
        """
        require_running("apex.parallel.Reducer")
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            params = list(self.module.parameters())
            flat_dist_call([p.detach() for p in params], torch.distributed.broadcast, (0,))
            return
        extract_tensors(module_or_grads_list, self.grads)
        if not self.grads:
            raise TypeError(
                f"apex.parallel.Reducer got {type(module_or_grads_list).__name__} without a "
                "tensor; it takes a module or an iterable of gradients."
            )

    def reduce(self) -> None:
        """Averages the gradients in place. Every process must call it."""
        if self.module is None:
            flat_dist_call(self.grads, torch.distributed.all_reduce)
            return
        params = [param for param in self.module.parameters() if param.requires_grad]
        reduce_gradients(params, GradientReduction())
