"""Matches 16-bit values with unrounded ones, element by element.

Without a host sync, except for sparse tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor


def exact_value(param: Tensor, known: Tensor | None) -> Tensor:
    """Returns a 16-bit tensor in fp32, in its layout, with unrounded values where they are known.

    An element is that of ``known``, such as a master, if this rounds to the parameter's element,
    and else the parameter's. If ``known`` has another shape, or other stored elements of a sparse
    tensor, all are the parameter's.
    """
    value = param.detach()
    if value.is_sparse:
        stored: Tensor | None = None
        # sync: whether the same elements are stored
        if known is not None and torch.equal(known._indices().to(value.device), value._indices()):
            stored = known.detach()._values()
        exact = exact_value(value._values(), stored)
        return torch.sparse_coo_tensor(
            value._indices(),
            exact,
            value.shape,
            is_coalesced=value.is_coalesced(),
            check_invariants=False,
        )
    wide = value.to(torch.float32)
    if known is None or known.shape != value.shape:
        return wide
    exact = known.detach().to(device=value.device, dtype=torch.float32)
    is_rounded_to_value = exact.to(value.dtype) == value
    return torch.where(is_rounded_to_value, exact, wide)
