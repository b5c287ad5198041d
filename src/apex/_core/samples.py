"""A few elements of a tensor, to compare bit for bit."""

from __future__ import annotations

from torch import Tensor

_ELEMENTS = 2**12


def sample(tensor: Tensor, turn: int = 0) -> Tensor:
    """Returns a view of at most 4096 elements of a strided tensor.

    Leaves out columns first, then rows: scripts write whole rows. ``turn`` selects others. Strides
    are odd, as what repeats in a tensor mostly does so after an even number of rows.
    """
    for dim in reversed(range(tensor.dim())):
        wanted = -(-tensor.numel() // _ELEMENTS) | 1
        stride = min(wanted, tensor.shape[dim])
        if stride > 1:
            start = turn % stride
            tensor = tensor.movedim(dim, 0)[start::stride].movedim(0, dim)
    return tensor
