"""2-norms over lists of tensors, alone or with the product that usually follows."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_C.lists import TensorLists, checked, raise_noop_
from apex._core.foreach import norms, scaling
from apex._core.foreach.gate import as_scalar
from apex._core.foreach.working import working


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Returns the 2-norm over all tensors; raises the flag if it is not finite.

    Args:
        chunk_size: Not used.
        noop_flag: One int32 element.
        tensor_lists: ``[tensors]``.
        per_tensor: Whether to return each tensor's norm, too.

    Returns:
        The norm (``[1]`` fp32, 0 of no tensors) and the norms (``[N]`` fp32, or ``[0]``).
    """
    del chunk_size
    (tensors,) = checked("multi_tensor_l2norm", noop_flag, tensor_lists, 1)
    return _reported(noop_flag, tensors, per_tensor)


@torch.no_grad()
def multi_tensor_l2norm_mp(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Returns what :func:`multi_tensor_l2norm` does.

    apex leaves its result undefined where the flag is set already; here it is the norm.
    """
    del chunk_size
    (tensors,) = checked("multi_tensor_l2norm_mp", noop_flag, tensor_lists, 1)
    return _reported(noop_flag, tensors, per_tensor)


@torch.no_grad()
def multi_tensor_l2norm_scale(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    scale: float | Tensor,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """Returns the norms of the sources as they are, and writes ``scale * source`` to the targets.

    Args:
        chunk_size: Not used.
        noop_flag: One int32 element; raised if the norm is not finite.
        tensor_lists: ``[sources, targets]``.
        scale: The multiplier.
        per_tensor: Whether to return each tensor's norm, too.
    """
    del chunk_size
    sources, targets = checked("multi_tensor_l2norm_scale", noop_flag, tensor_lists, 2)
    result = _reported(noop_flag, sources, per_tensor)
    if sources:
        scaling.scale_(sources, targets, as_scalar(scale, noop_flag.device))
    return result


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    inv_scale: float | Tensor,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """Returns the norms of ``inv_scale * tensor``; the tensors stay as they are.

    Args:
        chunk_size: Not used.
        noop_flag: One int32 element; raised if the norm is not finite.
        tensor_lists: ``[tensors]``.
        inv_scale: One over the loss scale, one element.
        per_tensor: Whether to return each tensor's norm, too.
    """
    del chunk_size
    (tensors,) = checked("multi_tensor_unscale_l2norm", noop_flag, tensor_lists, 1)
    if tensors:
        (wide,) = working(tensors)
        tensors = list(torch._foreach_mul(wide, as_scalar(inv_scale, noop_flag.device)))
    return _reported(noop_flag, tensors, per_tensor)


def _reported(
    noop_flag: Tensor, tensors: list[Tensor], per_tensor: bool | None
) -> tuple[Tensor, Tensor]:
    each = norms.stacked(norms.l2_norms(tensors), noop_flag.device)
    norm = norms.total(each).reshape(1)
    raise_noop_(noop_flag, ~torch.isfinite(norm))
    return norm, each if per_tensor else each[:0]
