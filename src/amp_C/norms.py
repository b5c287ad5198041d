"""2-norms over lists of tensors, optionally combined with scaling."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_C.lists import TensorLists, set_noop_, takes
from amp_C.scaling import multi_tensor_scale
from apex._core.dtypes import math_dtype
from apex._core.foreach import norms
from apex._torch.copies import as_scalar

__all__ = [
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_unscale_l2norm",
]


@takes(1, empty=True)
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Returns the 2-norm over all of ``[tensors]``; sets the flag if it is not finite.

    Returns:
        The norm, ``[1]`` in fp32 (0 without tensors), and the norm of each tensor, ``[N]`` in fp32
        (``[0]`` without ``per_tensor``).
    """
    (tensors,) = tensor_lists
    # In fp32 for every dtype, as in apex's kernel.
    each_norm = norms.norms_of(tensors, 2.0, noop_flag.device).float()
    norm = torch.linalg.vector_norm(each_norm).reshape(1)
    set_noop_(noop_flag, ~torch.isfinite(norm))
    if not per_tensor:
        each_norm = each_norm[:0]
    return norm, each_norm


multi_tensor_l2norm_mp = multi_tensor_l2norm
"""In apex, the result is undefined if the flag is already set; here, it is the norm."""


@takes(2, empty=True)
def multi_tensor_l2norm_scale(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    scale: float | Tensor,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """Returns :func:`multi_tensor_l2norm` of the sources, and writes ``scale * source`` to targets.

    ``tensor_lists`` are ``[sources, targets]``.
    """
    result = multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists[:1], per_tensor)
    multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale)
    return result


@takes(1, empty=True)
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    inv_scale: float | Tensor,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """Returns :func:`multi_tensor_l2norm` of ``inv_scale * tensor``; the tensors stay unchanged."""
    factor = as_scalar(inv_scale, noop_flag.device)
    scaled = [tensor.to(math_dtype(tensor)) * factor for tensor in tensor_lists[0]]
    return multi_tensor_l2norm(chunk_size, noop_flag, [scaled], per_tensor)
