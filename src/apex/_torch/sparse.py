"""The stored values of sparse tensors."""

from __future__ import annotations

from torch import Tensor


def stored_values(tensor: Tensor) -> Tensor:
    """Returns the values of a sparse COO tensor, coalesced or not, sharing memory with it.

    ``Tensor.values`` raises for a tensor that is not coalesced.
    """
    return tensor._values()
