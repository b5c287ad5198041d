"""torch's private kernels over lists of tensors."""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _foreach_utils

from apex._torch.copies import moved
from apex._torch.dispatcher import AUTOCAST_KEYS, has_kernel

has_graph = operator.attrgetter("requires_grad")
"""Returns whether a gradient is part of a graph, as after ``create_graph=True``."""

_dtype = operator.attrgetter("dtype")


def group(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields tensors in lists of one device and dtype, as kernels require.

    Yields real views of complex tensors, so that one kernel handles all.
    """
    if not tensors:  # torch refuses an empty list
        return
    # Not the optimizers' method, which makes one group while any thread compiles.
    groups: Any = _foreach_utils._group_tensors_by_device_and_dtype([[*tensors]])
    for (_, dtype), (lists, _) in groups.items():
        same = lists[0]
        if dtype.is_complex:
            same = [torch.view_as_real(tensor) for tensor in same]
        yield same


def unscale_(values: Sequence[Tensor], inverse_scale: float) -> None:
    """Multiplies gradients by ``inverse_scale`` in place, without a check."""
    for grads in group(values):
        torch._foreach_mul_(grads, inverse_scale)


def unscale_and_check_(values: Sequence[Tensor], inverse_scale: Tensor, found_inf: Tensor) -> None:
    """Multiplies gradients by ``inverse_scale`` in place; sets ``found_inf`` to 1 on inf or NaN.

    No host sync. Never clears ``found_inf``, so calls accumulate.

    Args:
        values: Dense gradients on any device, of any floating-point or complex dtype.
        inverse_scale: 0-d fp32, one over the loss scale.
        found_inf: 0-d fp32.
    """
    for grads in group(values):
        device = grads[0].device
        flag = found_inf
        if device != found_inf.device:
            flag = torch.zeros_like(found_inf, device=device)
        _unscale_and_check_(grads, moved(inverse_scale, device), flag)
        if flag is not found_inf:
            torch.maximum(found_inf, moved(flag, found_inf.device), out=found_inf)


def _unscale_and_check_(grads: list[Tensor], inverse_scale: Tensor, found_inf: Tensor) -> None:
    """Unscales and checks gradients of one device and dtype.

    The product is part of the graph that gradients of a pass with ``create_graph=True`` have.
    """
    if any(map(has_graph, grads)):  # which the kernel does not record
        values = [grad.detach() for grad in grads]
        _unscale_and_check_(values, torch.ones_like(inverse_scale), found_inf)
        torch._foreach_mul_(grads, inverse_scale)
    elif grads[0].dtype is torch.bfloat16 and not grads[0].is_cpu:
        # Only the CPU kernel accepts bf16 (torch 2.13).
        wide = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
        copy_(wide, grads)
        _unscale_and_check_(wide, inverse_scale, found_inf)
        copy_(grads, wide)
    else:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse_scale)


def _by_dtype(
    kernel: Callable[..., Any], targets: Sequence[Tensor], sources: Sequence[Tensor]
) -> None:
    """Calls ``kernel`` for targets of one dtype and sources of one at a time.

    In torch 2.6 to 2.10, CUDA's copy writes past targets of several
    (https://github.com/pytorch/pytorch/pull/173531).
    """
    target_dtypes = {*map(_dtype, targets)}
    source_dtypes = {*map(_dtype, sources)}
    if len(target_dtypes) == len(source_dtypes) == 1:
        kernel(list(targets), list(sources))
        return
    by_dtypes: defaultdict[object, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for target, source in zip(targets, sources, strict=True):
        by_dtypes[target.dtype, source.dtype].append((target, source))
    for pairs in by_dtypes.values():
        kernel(*zip(*pairs, strict=True))


copy_ = functools.partial(_by_dtype, torch._foreach_copy_)
"""Copies each source into its target, in its dtype; autograd records nothing."""

add_ = functools.partial(_by_dtype, torch._foreach_add_)
"""Adds each source to its target, in its dtype."""


update_scale_: Callable[..., Any] = torch._amp_update_scale_
"""Updates 0-d scale and clean-step count in place by ``found_inf``, without a host sync."""


def fused_kernel(name: str, device: torch.device) -> Callable[..., Any] | None:
    """Returns torch's kernel of a whole step, such as ``"_fused_adam_"``, if ``device`` has it."""
    # The devices with autocast are those whose name is a dispatch key's.
    if device.type in AUTOCAST_KEYS and has_kernel(f"aten::{name}", device.type.upper()):
        kernel: Callable[..., Any] = getattr(torch, name)
        return kernel
    return None
