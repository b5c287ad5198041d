"""Matches 16-bit values with unrounded ones, element by element, without a host sync."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def exact_value(param: Tensor, candidates: Iterable[Tensor | None]) -> Tensor:
    """Returns a 16-bit tensor in fp32, in its layout, with unrounded values where they are known.

    Each element is taken from the last candidate (such as a master) that rounds to the parameter's
    element; if there is none, from the parameter. Candidates that are ``None``, or have another
    shape or other stored elements of a sparse tensor, are ignored.
    """
    value = param.detach()
    if value.is_sparse:
        stored = [_stored_at(value, known) for known in candidates if known is not None]
        exact = exact_value(value._values(), stored)
        return torch.sparse_coo_tensor(
            value._indices(),
            exact,
            value.shape,
            is_coalesced=value.is_coalesced(),
            check_invariants=False,
        )
    result = value
    for candidate in candidates:
        if candidate is None or candidate.shape != value.shape:
            continue
        exact = candidate.detach().to(device=value.device, dtype=torch.float32)
        is_rounded_to_value = exact.to(value.dtype) == value
        result = torch.where(is_rounded_to_value, exact, result)
    return result.to(torch.float32)


def _stored_at(param: Tensor, known: Tensor) -> Tensor | None:
    """Returns the stored values of a sparse tensor if they are those of the same elements."""
    if known._indices().shape != param._indices().shape:
        return None
    is_same = (known._indices().to(param.device) == param._indices()).all()
    return torch.where(is_same, known.detach()._values().to(param.device), torch.nan)
