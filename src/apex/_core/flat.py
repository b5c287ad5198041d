"""Flattens dense tensors into one tensor, and back: ``apex_C``, which may be NVIDIA's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def flatten(bucket: Sequence[Tensor]) -> Tensor:
    """Returns a new 1-d tensor with all elements of ``bucket``.

    Args:
        bucket: Dense tensors of one device; at least one. As in apex, torch's rule
            promotes several dtypes.
    """
    return torch.cat([tensor.reshape(-1) for tensor in bucket])


def unflatten(coalesced: Tensor, bucket: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of ``coalesced`` in the shapes of ``bucket``, in their order.

    Args:
        coalesced: A 1-d tensor of any dtype.
        bucket: Tensors that determine the shapes of the views.

    Raises:
        RuntimeError: From ``torch.split``, if the numbers of elements differ.
    """
    sizes = [tensor.numel() for tensor in bucket]
    pieces = torch.split(coalesced, sizes)
    return [piece.view(like.shape) for piece, like in zip(pieces, bucket, strict=True)]
