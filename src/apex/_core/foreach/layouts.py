"""The memory layout that tensors share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def shared_layout(tensors: Sequence[Tensor]) -> torch.memory_format | None:
    """Returns the layout that all tensors share, without gaps; ``None`` if there is none."""
    for layout in _LAYOUTS:
        if all(tensor.is_contiguous(memory_format=layout) for tensor in tensors):
            return layout
    return None
