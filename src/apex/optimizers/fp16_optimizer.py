"""The ``FP16_Optimizer`` of 2019: masters and loss scale around an optimizer of a 16-bit model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from apex._core.flat import flatten
from apex.fp16_utils.master_wrapper import MasterWrapper


class FP16_Optimizer(MasterWrapper):  # noqa: N801 - apex's name
    """Trains a 16-bit model with fp32 masters and a loss scale; skips steps that overflow.

    Masters get their gradients in ``step``. It clips nothing and takes no closure, as in apex: see
    :class:`apex.fp16_utils.FP16_Optimizer` for these.
    """

    _flats: Sequence[Tensor] = ()

    @property
    def fp32_groups_flat(self) -> list[Tensor]:
        """What the optimizer steps, one flat tensor per group; writes to it reach the masters.

        The first read moves the masters and fp32 parameters of each group into one memory.
        """
        groups = self._stepped()
        addresses = [flat.data_ptr() for flat in self._flats]
        if addresses != [params[0].data_ptr() for params in groups]:
            self._flats = [_moved_together(params) for params in groups]
        return [*self._flats]

    def _joined(self, params: list[nn.Parameter]) -> Any:
        return flatten([param.detach() for param in params])


@torch.no_grad()
def _moved_together(params: list[nn.Parameter]) -> Tensor:
    """Moves parameters into one memory, and returns it as one tensor."""
    flat = flatten(params)
    offset = 0
    for param in params:
        # A fused step reads the state in the layout of its parameter.
        strides = torch.empty_like(param).stride()
        param.data = flat.as_strided(param.shape, strides, offset).copy_(param)
        offset += param.numel()
    return flat
