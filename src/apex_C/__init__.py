"""apex's ``apex_C``: dense tensors as one flat tensor, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Returns all elements of ``tensors`` in one new 1-d tensor.

    Args:
        tensors: Dense tensors of one dtype and device; at least one.

    Raises:
        ValueError: If there is none, or dtypes or devices differ.
    """
    tensors = list(tensors)
    if not tensors:
        raise ValueError("apex_C.flatten got no tensors; it takes at least one.")
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) > 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(
            f"apex_C.flatten got tensors of {found}; one flat tensor has one dtype and device. "
            "Flatten them apart."
        )
    return torch.cat([tensor.contiguous().view(-1) for tensor in tensors])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of ``flat`` in the shapes of ``tensors``, in their order.

    Args:
        flat: A 1-d tensor of any dtype.
        tensors: What it is a flat form of; only their shapes matter.

    Raises:
        ValueError: If the number of elements is not theirs.
    """
    sizes = [tensor.numel() for tensor in tensors]
    if flat.dim() != 1 or flat.numel() != sum(sizes):
        raise ValueError(
            f"apex_C.unflatten got a flat tensor of shape {tuple(flat.shape)} for tensors of "
            f"{sum(sizes)} elements in all; it takes a 1-d one with exactly as many."
        )
    pieces = torch.split(flat, sizes)
    return [piece.view(like.shape) for piece, like in zip(pieces, tensors, strict=True)]
