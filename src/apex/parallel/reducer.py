"""Gradients averaged over processes when the script says so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from apex.parallel.flat_calls import extract_tensors, flat_dist_call
from apex.parallel.gradient_reduction import GradientReduction, reduce_gradients
from apex.parallel.process_groups import require_running, require_same_parameters


class Reducer:
    """Averages gradients over all processes at each call of ``reduce``.

    Given a module, it also sets the parameters of every process to those of rank 0, once. Given
    gradients, that is left to the script.

    Attributes:
        module: The module, or ``None``.
        grads: The gradients given in its place.
    """

    def __init__(self, module_or_grads_list: Any) -> None:
        """Takes a module, or gradients in any nesting of iterables.

        Raises:
            RuntimeError: If torch.distributed is not initialized, or the processes hold modules
                with different parameters.
            TypeError: If there is neither a module nor a tensor.
        """
        require_running("apex.parallel.Reducer")
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            params = list(self.module.parameters())
            require_same_parameters("apex.parallel.Reducer", params)
            flat_dist_call([p.detach() for p in params], torch.distributed.broadcast, (0,))
            return
        extract_tensors(module_or_grads_list, self.grads)
        if not self.grads:
            raise TypeError(
                f"apex.parallel.Reducer got {type(module_or_grads_list).__name__} without a "
                "tensor in it; it takes a module, or an iterable of gradients."
            )

    def reduce(self) -> None:
        """Averages the gradients, in place. Every process must call it."""
        if self.module is None:
            flat_dist_call(self.grads, torch.distributed.all_reduce)
            return
        params = [param for param in self.module.parameters() if param.requires_grad]
        received = {index for index, param in enumerate(params) if param.grad is not None}
        reduce_gradients(params, received, GradientReduction())
