"""Norms of lists of tensors, accumulated in fp32 or wider."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex._core.dtypes import LOW_PRECISION, math_dtype
from apex._torch import dtensor
from apex._torch.copies import moved

LARGEST = float("inf")
"""The order of the norm that is the largest absolute value."""

# The CPU's kernel adds up squares one after the other: of 33 M elements it loses 1.5e-3 of the norm
# (torch 2.13), in pieces of this size 1e-6, in the same time.
_PIECE = 2**16

_ONE_CALL = (torch.float32, *LOW_PRECISION)


def norms_of(tensors: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Returns the norm of every tensor, 0 if empty: ``[N]`` on ``device``, fp32 or fp64."""
    filled = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    # One call takes one dtype, which must not be narrower than a tensor's own. For DTensors torch
    # 2.14 takes the dtype for a dimension: https://github.com/pytorch/pytorch/pull/194033. On a CPU
    # it would hold fp32 copies of all 16-bit tensors at once.
    one_call = bool(filled) and not dtensor.any_dtensor(filled)
    for tensor in filled:
        if tensor.is_cpu or tensor.dtype not in _ONE_CALL:
            one_call = False
    norms: Sequence[Tensor]
    if one_call:
        norms = torch._foreach_norm(filled, norm_type, dtype=torch.float32)
    else:
        norms = [_norm(tensor, norm_type) for tensor in filled]
    return stacked(norms, device)


def _norm(tensor: Tensor, norm_type: float) -> Tensor:
    is_long = norm_type == 2.0 and tensor.is_cpu and tensor.numel() > _PIECE
    if is_long and not dtensor.is_dtensor(tensor):
        pieces = torch.split(tensor.reshape(-1), _PIECE)
        tensor = torch.stack([_norm(piece, norm_type) for piece in pieces])
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor, norm_type, dtype=dtype)
    return norm


def stacked(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns 0-d norms as one tensor of shape ``[N]`` on ``device``: fp64 if one is, or fp32."""
    dtype = math_dtype(*norms)
    if not norms:
        return torch.zeros(0, dtype=dtype, device=device)
    return torch.stack([moved(norm, device, dtype) for norm in norms])


def global_norm(tensors: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """Returns the norm over all tensors: 0-d, on the first's device; 0 of none."""
    if not tensors:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    norms = norms_of(tensors, norm_type, tensors[0].device)
    norm: Tensor = torch.linalg.vector_norm(norms, norm_type)
    return norm


def any_non_finite(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns a 0-d bool: whether any value is inf or NaN. No host sync."""
    return ~norms_of(tensors, LARGEST, device).isfinite().all()
