"""Norms of lists of tensors, accumulated in fp32 or wider."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex._core.dtypes import LOW_PRECISION
from apex._torch import dtensor
from apex._torch.copies import moved

# The CPU's kernel adds up squares one after the other: of 33 M elements it loses 1.5e-3 of the norm
# (torch 2.13), in pieces of this size 1e-6, in the same time.
_PIECE = 2**16

_ONE_CALL = (torch.float32, *LOW_PRECISION)


def l2_norms(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the 2-norm of every tensor: ``[N]`` on ``device``, fp32 (fp64 if a norm is)."""
    # One call takes one dtype, and refuses one narrower than a tensor's own. For DTensors torch
    # 2.14 takes the dtype for a dimension: https://github.com/pytorch/pytorch/pull/194033. On a CPU
    # it would hold fp32 copies of all 16-bit tensors at once.
    one_call = all(tensor.dtype in _ONE_CALL and not tensor.is_cpu for tensor in tensors)
    if tensors and one_call and not dtensor.any_dtensor(tensors):
        return stacked(torch._foreach_norm([*tensors], 2, dtype=torch.float32), device)
    return stacked([_l2_norm(tensor) for tensor in tensors], device)


def _l2_norm(tensor: Tensor) -> Tensor:
    if not tensor.is_cpu or tensor.numel() <= _PIECE or dtensor.is_dtensor(tensor):
        return _norm(tensor, 2.0)
    pieces = torch.split(tensor.reshape(-1), _PIECE)
    return _norm(torch.stack([_norm(piece, 2.0) for piece in pieces]), 2.0)


def _norm(tensor: Tensor, norm_type: float) -> Tensor:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor, norm_type, dtype=dtype)
    return norm


def max_norms(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the largest absolute value of every tensor, 0 if empty: ``[N]`` on ``device``."""
    values = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    return stacked(torch._foreach_norm(values, float("inf")) if values else (), device)


def stacked(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns 0-d norms as one tensor of shape ``[N]`` on ``device``: fp64 if one is, or fp32."""
    if not norms:
        return torch.zeros(0, dtype=torch.float32, device=device)
    wide = any(norm.dtype is torch.float64 for norm in norms)
    dtype = torch.float64 if wide else torch.float32
    return torch.stack([moved(norm, device, dtype) for norm in norms])


def global_norm(tensors: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """Returns the norm over all tensors: 0-d, on the first's device; 0 of none."""
    device = tensors[0].device if tensors else torch.device("cpu")
    if norm_type == 2.0:
        norms = l2_norms(tensors, device)
    else:
        norms = stacked([_norm(tensor, norm_type) for tensor in tensors], device)
    norm: Tensor = torch.linalg.vector_norm(norms, norm_type)
    return norm


def any_non_finite(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns a 0-d bool: whether any value is inf or NaN. No host sync."""
    return ~max_norms(tensors, device).isfinite().all()
