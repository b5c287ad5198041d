"""Tensors without memory for all their values: sparse ones, and autograd's zeros."""

from __future__ import annotations

import torch
from torch import Tensor


def stored_values(tensor: Tensor) -> Tensor:
    """Returns the values of a sparse COO tensor, coalesced or not, sharing memory with it.

    ``Tensor.values`` raises for a tensor that is not coalesced.
    """
    return tensor._values()


def with_memory(tensor: Tensor) -> Tensor:
    """Returns a tensor; zeros for one without memory, such as the gradient of ``sgn``."""
    return torch.zeros_like(tensor) if tensor._is_zerotensor() else tensor
