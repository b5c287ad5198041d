"""Matches 16-bit values with unrounded ones, element by element, without a host sync."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def exact_value(param: Tensor, candidates: Iterable[Tensor | None]) -> Tensor:
    """Returns a 16-bit tensor in fp32, in its layout, with unrounded values where they are known.

    Each element is taken from the last candidate (such as a master) that rounds to the parameter's
    element; if there is none, from the parameter. Candidates that are ``None`` or have another
    shape are ignored. For a sparse parameter, all candidates are ignored.
    """
    value = param.detach()
    result = value
    for candidate in candidates:
        if candidate is None or candidate.shape != value.shape or value.is_sparse:
            continue
        exact = candidate.detach().to(device=value.device, dtype=torch.float32)
        is_rounded_to_value = exact.to(value.dtype) == value
        result = torch.where(is_rounded_to_value, exact, result)
    return result.to(torch.float32)
