"""The ``FP16_Optimizer`` of 2019: masters and loss scale around an optimizer of a 16-bit model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from apex._core.flat import flatten
from apex.fp16_utils.master_wrapper import MasterWrapper


class FP16_Optimizer(MasterWrapper):  # noqa: N801 - apex's name
    """Trains a 16-bit model with fp32 masters and a loss scale; skips steps that overflow.

    Masters get their gradients in ``step``, which clips nothing and takes no closure, as in apex.
    :class:`apex.fp16_utils.FP16_Optimizer` supports both.
    """

    @property
    def fp32_groups_flat(self) -> list[Tensor]:
        """The optimizer's parameters, one flat tensor per group; writes to it reach the masters.

        The first read moves the masters and fp32 parameters of each group into one block of memory.
        """
        return [_flat_memory(params) for params in self._stepped()]

    def _joined(self, params: list[nn.Parameter]) -> Any:
        return flatten(super()._joined(params)) if params else torch.empty(0)


@torch.no_grad()
def _flat_memory(params: list[nn.Parameter]) -> Tensor:
    """Returns one flat tensor that shares its memory with these fp32 parameters, and no others."""
    size = sum(param.numel() for param in params)
    memories = {param.untyped_storage().data_ptr() for param in params}
    first = params[0]
    # Already one block of memory, which contains nothing else.
    if len(memories) == 1 and first.untyped_storage().nbytes() == 4 * size:
        return first.detach().as_strided((size,), (1,), 0)
    flat = flatten(params)
    offset = 0
    for param in params:
        # A fused step reads the state in the layout of its parameter, so the layout stays.
        strides = torch.empty_like(param).stride()
        view = flat.as_strided(param.shape, strides, offset)
        view.copy_(param)
        param.data = view
        offset += param.numel()
    return flat
