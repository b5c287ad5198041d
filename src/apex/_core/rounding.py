"""Matches 16-bit values with unrounded ones, element by element, without a host sync."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def exact_value(param: Tensor, candidates: Iterable[Tensor | None]) -> Tensor:
    """Returns a 16-bit tensor in fp32, in its layout, with unrounded values where they are known.

    Each element comes from the last candidate, such as a master, that rounds to the parameter's
    element, or from the parameter if there is none. ``None`` and other shapes are ignored, and so
    are all of a sparse parameter.
    """
    result = value = param.detach()
    for candidate in candidates:
        if candidate is not None and candidate.shape == param.shape and not value.is_sparse:
            exact = candidate.detach().to(device=value.device, dtype=torch.float32)
            result = torch.where(exact.to(value.dtype) == value, exact, result)
    return result.to(torch.float32)


@torch.no_grad()
def makes_equal(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns whether rounding to ``dtype`` makes distinct elements equal, as a 0-d bool tensor."""
    exact = value.detach().flatten().sort().values
    rounded = exact.to(dtype)
    return ((exact[1:] != exact[:-1]) & (rounded[1:] == rounded[:-1])).any()
