"""The floating-point types that mixed precision casts between, and the one cast rule."""

from __future__ import annotations

import torch
from torch import Tensor

LOW_PRECISION: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
"""The two 16-bit types that a level may compute in."""

CASTABLE: frozenset[torch.dtype] = frozenset({*LOW_PRECISION, torch.float32, torch.float64})
"""Types that amp casts from and to; integers, complex, float8 and quantized types stay."""


def is_castable(tensor: Tensor) -> bool:
    """Returns whether amp may change the dtype of ``tensor`` (fp16, bf16, fp32, fp64)."""
    return tensor.dtype in CASTABLE


def is_low_precision(tensor: Tensor) -> bool:
    """Returns whether ``tensor`` is fp16 or bf16."""
    return tensor.dtype in LOW_PRECISION


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``tensor`` in ``dtype``; the same object where nothing is to be cast.

    Differentiable. Tensors that are not castable (integers, complex, ...) come back unchanged.
    """
    if tensor.dtype is dtype or tensor.dtype not in CASTABLE:
        return tensor
    return tensor.to(dtype)


def name(dtype: torch.dtype) -> str:
    """Returns the short name of ``dtype``, such as ``"float16"``."""
    return str(dtype).removeprefix("torch.")
