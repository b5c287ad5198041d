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


def l2_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the 2-norm of every tensor: 0-d, fp32 (fp64 for fp64 and complex128 tensors)."""
    one_call = all(tensor.dtype in _ONE_CALL for tensor in tensors)
    if one_call and not dtensor.any_dtensor(tensors):
        return _norms_of_pieces([pieces(tensor) for tensor in tensors])
    # One call takes one dtype, and refuses one narrower than a tensor's own. For DTensors torch
    # 2.14 takes the dtype for a dimension: https://github.com/pytorch/pytorch/pull/194033.
    return [
        torch.linalg.vector_norm(t, dtype=torch.float32 if t.dtype in _ONE_CALL else None)
        for t in tensors
    ]


def pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Returns a tensor in pieces of which the norm kernel of its device is exact."""
    cut = tensor.device.type == "cpu" and tensor.numel() > _PIECE
    if not cut or dtensor.is_dtensor(tensor):
        return (tensor,)
    return torch.split(tensor.reshape(-1), _PIECE)


def _norms_of_pieces(tensors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    listed = [piece for parts in tensors for piece in parts]
    # On a CPU, one call would hold fp32 copies of all 16-bit tensors at once.
    if any(each.dtype is not torch.float32 and each.device.type == "cpu" for each in listed):
        norms = iter([torch.linalg.vector_norm(each, dtype=torch.float32) for each in listed])
    else:
        norms = iter(torch._foreach_norm(listed, 2, dtype=torch.float32) if listed else ())
    return [
        next(norms) if len(parts) == 1 else total(torch.stack([next(norms) for _ in parts]))
        for parts in tensors
    ]


def max_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the largest absolute value of every tensor, 0 if empty: 0-d, in its dtype."""
    full = [tensor for tensor in tensors if tensor.numel()]
    found = iter(torch._foreach_norm(full, float("inf")) if full else ())
    return [next(found) if t.numel() else t.new_zeros(()) for t in tensors]


def stacked(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns 0-d norms as one tensor of shape ``[N]`` on ``device``: fp64 if one is, or fp32."""
    if not norms:
        return torch.zeros(0, dtype=torch.float32, device=device)
    wide = any(norm.dtype is torch.float64 for norm in norms)
    return torch.stack([moved(n, device, torch.float64 if wide else torch.float32) for n in norms])


def total(norms: Tensor) -> Tensor:
    """Returns the 2-norm over all tensors (0-d) from their norms (``[N]``); 0 for none."""
    norm: Tensor = torch.linalg.vector_norm(norms)
    return norm


def global_norm(tensors: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """Returns the norm over all of at least one tensor: 0-d, on the first's device."""
    device = tensors[0].device
    if norm_type == 2.0:
        return total(stacked(l2_norms(tensors), device))
    parts = [part for tensor in tensors for part in pieces(tensor)]
    wide = [torch.promote_types(part.dtype, torch.float32) for part in parts]
    found = zip(parts, wide, strict=True)
    each = stacked([torch.linalg.vector_norm(t, norm_type, dtype=d) for t, d in found], device)
    norm: Tensor = torch.linalg.vector_norm(each, norm_type) if norm_type else each.sum()
    return norm


def any_non_finite(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns a 0-d bool: whether any value is inf or NaN. No host sync."""
    return ~stacked(max_norms(tensors), device).isfinite().all()
