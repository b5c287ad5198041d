"""What is known of a value behind its 16-bit rounding, element by element, without a host sync."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from apex._torch import dtensor, parameters


@torch.no_grad()
def exact_value(param: Tensor, candidates: Iterable[Tensor]) -> Tensor:
    """Returns the value of ``param`` in fp32, as exactly as it is known.

    Each element is that of the last candidate which rounds to the parameter's element, and the
    parameter's own where none does.

    Args:
        param: A low-precision tensor.
        candidates: Unrounded values of it, such as its master; those of another shape are left out.

    Returns:
        A new fp32 tensor with the parameter's shape and layout.
    """
    value = dtensor.local(param.detach())
    result = value.to(torch.float32)
    for candidate in candidates:
        if candidate.shape == param.shape:
            known = dtensor.local(dtensor.laid_out_as(param, candidate.detach()))
            exact = known.to(device=value.device, dtype=torch.float32)
            result = torch.where(exact.to(value.dtype) == value, exact, result)
    return dtensor.with_local(param, result)


@torch.no_grad()
def follow(param: Tensor, master: Tensor, *, keep_low_bits: bool = True) -> None:
    """Writes ``param`` into its fp32 ``master`` where it is not the rounded master already.

    Args:
        param: A low-precision tensor.
        master: Its fp32 value, written in place.
        keep_low_bits: Whether elements that agree keep what rounding hides.
    """
    value, exact = dtensor.locals_of([param, master])
    rounded = value.to(device=exact.device, dtype=torch.float32)
    if keep_low_bits:
        rounded = torch.where(exact.to(value.dtype).to(torch.float32) == rounded, exact, rounded)
    # Uncounted: a loss that uses masters directly may hold them for its backward pass.
    parameters.uncounted(exact).copy_(rounded)
