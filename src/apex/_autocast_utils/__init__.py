"""apex's private autocast helpers, which other projects' fused layers import."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from apex._core import tree
from apex._torch.dispatcher import is_under_autocast

__all__ = ["_cast_if_autocast_enabled"]


def _cast_if_autocast_enabled(*args: Any) -> tuple[Any, ...]:
    """Returns ``args`` with the tensors cast to the autocast dtype of their device.

    Looks into nested containers. Leaves fp64 tensors and tensors of devices without active autocast
    unchanged.
    """
    return tree.map_tensors(_cast, args)


def _get_current_dtype(dtype: torch.dtype | None = None) -> torch.dtype:
    """Returns autocast's dtype on CUDA, or fp32 if autocast is off; ignores ``dtype``."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else torch.float32


def _get_autocast_dtypes() -> list[torch.dtype]:
    """Returns the 16-bit dtypes that autocast supports on CUDA; both without a GPU."""
    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        return [torch.float16]
    return [torch.float16, torch.bfloat16]


def _cast(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.float64 or not is_under_autocast(tensor):
        return tensor
    return tree.cast(tensor, torch.get_autocast_dtype(tensor.device.type))
