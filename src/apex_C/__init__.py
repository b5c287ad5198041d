"""apex's ``apex_C``: flattens dense tensors into one tensor, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a new 1-d tensor with all elements of ``tensors``.

    Args:
        tensors: Dense tensors of one dtype and device; at least one.

    Raises:
        ValueError: If there are no tensors, or dtypes or devices differ.
    """
    tensors = list(tensors)
    if not tensors:
        raise ValueError("apex_C.flatten got no tensors; it takes at least one.")
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) > 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(
            f"apex_C.flatten got tensors of {found}; a flat tensor has one dtype and device. "
            "Flatten them separately."
        )
    return torch.cat([tensor.contiguous().view(-1) for tensor in tensors])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of ``flat`` in the shapes of ``tensors``, in their order.

    Args:
        flat: A 1-d tensor of any dtype.
        tensors: Tensors that determine the shapes of the views.

    Raises:
        ValueError: If the numbers of elements differ.
    """
    sizes = [tensor.numel() for tensor in tensors]
    if flat.dim() != 1 or flat.numel() != sum(sizes):
        raise ValueError(
            f"apex_C.unflatten got a flat tensor of shape {tuple(flat.shape)} for tensors with "
            f"{sum(sizes)} elements in total; it takes a 1-d tensor with the same number."
        )
    pieces = torch.split(flat, sizes)
    return [piece.view(like.shape) for piece, like in zip(pieces, tensors, strict=True)]
