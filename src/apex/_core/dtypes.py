"""The floating-point dtypes that amp casts between."""

from __future__ import annotations

import torch
from torch import Tensor

LOW_PRECISION: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
"""The 16-bit dtypes that a level may compute in."""

CASTABLE: frozenset[torch.dtype] = frozenset({*LOW_PRECISION, torch.float32, torch.float64})
"""Dtypes that amp casts from and to; not integer, complex, float8 and quantized ones."""

_LAYOUTS = (torch.strided, torch.sparse_coo)


def is_castable(tensor: Tensor) -> bool:
    """Returns whether amp may change the dtype of ``tensor`` (fp16, bf16, fp32, fp64).

    False for compressed sparse tensors (CSR and its relatives): torch cannot replace their values
    in place.
    """
    return tensor.dtype in CASTABLE and tensor.layout in _LAYOUTS


def is_low_precision(tensor: Tensor) -> bool:
    """Returns whether ``tensor`` is fp16 or bf16."""
    return tensor.dtype in LOW_PRECISION


def is_code(tensor: Tensor) -> bool:
    """Returns whether ``tensor`` holds one-byte codes of other numbers, as 8-bit moments do."""
    return tensor.dim() > 0 and tensor.dtype.itemsize == 1 and tensor.dtype is not torch.bool


def math_dtype(*tensors: Tensor) -> torch.dtype:
    """Returns the dtype to compute in: fp64 if any of ``tensors`` is fp64, else fp32."""
    wide = any(tensor.dtype is torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def name(dtype: torch.dtype) -> str:
    """Returns the short name of ``dtype``, such as ``"float16"``."""
    return str(dtype).removeprefix("torch.")
