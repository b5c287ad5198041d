"""``out = scale * x`` and ``out = a * x + b * y`` over lists of floating-point tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex._core.finite import group
from apex._core.foreach.gate import Scalar, as_tensor
from apex._core.foreach.norms import any_non_finite
from apex._core.foreach.working import fresh, math_dtype, store, working
from apex._torch import foreach


def scale_(sources: Sequence[Tensor], targets: Sequence[Tensor], scale: Scalar) -> Tensor:
    """Writes ``scale * source`` into each target, rounded once; targets may be the sources.

    Returns:
        A 0-d fp32 flag: 1 if any source held inf or NaN.
    """
    device = sources[0].device
    found_inf = torch.zeros((), device=device)
    # GradScaler's kernel, which multiplies in place and checks its input.
    factor = as_tensor(scale, device)
    values = [_product(s, t) for s, t in zip(sources, targets, strict=True)]
    store(values, sources)
    for same in group(values):
        foreach.check_and_unscale_(same, found_inf, factor)
    store(targets, values)
    return found_inf


def _product(source: Tensor, target: Tensor) -> Tensor:
    """Returns the tensor to multiply in: the target, unless it would round the source."""
    if target is source or target.dtype is source.dtype:
        return target
    dtype = math_dtype(source, target)
    return target if target.dtype is dtype else torch.empty_like(target, dtype=dtype)


def axpby_(
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    targets: Sequence[Tensor],
    a: Scalar,
    b: Scalar,
    *,
    check: Sequence[Sequence[Tensor]],
) -> Tensor:
    """Writes ``a * x + b * y`` into each target, rounded once; targets may be xs or ys.

    Returns:
        A 0-d bool flag: whether any tensor in the lists ``check`` held inf or NaN.
    """
    device = xs[0].device
    found_inf = any_non_finite([tensor for tensors in check for tensor in tensors], device)
    left, right = working(xs, ys)
    total = fresh(left, xs)
    torch._foreach_mul_(total, a)
    if isinstance(b, Tensor):
        torch._foreach_add_(total, torch._foreach_mul(right, b))
    else:
        torch._foreach_add_(total, right, alpha=b)
    store(targets, total)
    return found_inf
