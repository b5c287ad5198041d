"""Which of torch's fused optimizer kernels a device has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from apex._torch import dispatcher, private

_KEYS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}


def has_fused(name: str, device: torch.device) -> bool:
    """Returns whether ``torch.<name>`` (such as ``_fused_adam_``) has a kernel for ``device``."""
    key = _KEYS.get(device.type)
    return key is not None and dispatcher.has_kernel(f"aten::{name}", key)


def same_dtype(*lists: list[Tensor]) -> Iterator[list[list[Tensor]]]:
    """Yields the lists in parts of one dtype, as the fused kernels want them.

    All lists must agree in the dtype of each position.
    """
    dtypes = {tensor.dtype for tensor in lists[0]}
    if len(dtypes) == 1:
        yield list(lists)
        return
    nested: Any = list(lists)
    groups: Any = private.group(nested)
    for parts, _ in groups.values():
        yield parts
