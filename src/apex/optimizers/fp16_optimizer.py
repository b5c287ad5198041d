"""The ``FP16_Optimizer`` of 2019: masters and loss scale around an optimizer of a 16-bit model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from apex.fp16_utils.master_wrapper import MasterWrapper


class FP16_Optimizer(MasterWrapper):  # noqa: N801 - apex's name
    """Trains a 16-bit model with fp32 masters and a loss scale; skips steps that overflow.

    Masters get their gradients in ``step``. It clips nothing and takes no closure, as in apex: see
    :class:`apex.fp16_utils.FP16_Optimizer` for these.
    """

    @property
    def fp32_groups_flat(self) -> list[Tensor]:
        """What the optimizer steps, one flat tensor per group; writes to it reach the masters.

        The first read moves the masters and fp32 parameters of each group into one memory.
        """
        return [_flat_memory(params) for params in self._stepped()]

    def _joined(self, params: list[nn.Parameter]) -> Any:
        return torch.cat([param.detach().flatten() for param in params])


@torch.no_grad()
def _flat_memory(params: list[nn.Parameter]) -> Tensor:
    """Returns the memory of ``params`` as one tensor; moves them together unless they are."""
    sizes = [param.numel() for param in params]
    starts = [param.data_ptr() - 4 * sum(sizes[:index]) for index, param in enumerate(params)]
    storages = {param.untyped_storage().data_ptr() for param in params}
    if len(storages) == 1 and len(set(starts)) == 1:
        return params[0].detach().as_strided((sum(sizes),), (1,))
    flat = torch.cat([param.flatten() for param in params])
    for param, part in zip(params, torch.split(flat, sizes), strict=True):
        # A fused step reads the state in the layout of its parameter.
        strides = torch.empty_like(param).stride()
        param.data = part.as_strided(param.shape, strides, part.storage_offset()).copy_(param)
    return flat
