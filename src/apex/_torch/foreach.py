"""torch's private kernels over lists of tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex._torch.copies import moved
from apex._torch.dispatcher import AUTOCAST_KEYS, has_kernel

_has_graph = operator.attrgetter("requires_grad")
_dtype = operator.attrgetter("dtype")


def check_and_unscale_(grads: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Multiplies ``grads`` by 0-d ``inverse`` in place; sets 0-d ``found_inf`` on inf or NaN.

    All on one device, gradients in one real floating-point dtype. The product is part of the graph
    that gradients of a pass with ``create_graph=True`` have.
    """
    if _are_recorded(grads):  # but the kernel is not
        with torch.no_grad():
            check_and_unscale_([grad.detach() for grad in grads], found_inf, inverse.new_ones(()))
        torch._foreach_mul_(grads, inverse)
    elif grads and grads[0].dtype is torch.bfloat16 and grads[0].device.type != "cpu":
        # Only the CPU kernel accepts bf16 (torch 2.13).
        wide = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
        copy_(wide, grads)
        torch._amp_foreach_non_finite_check_and_unscale_(wide, found_inf, inverse)
        copy_(grads, wide)
    else:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse)


def copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into its target, in its dtype; autograd records nothing."""
    _by_dtype(torch._foreach_copy_, targets, sources)


def add_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Adds each source to its target, in its dtype."""
    _by_dtype(torch._foreach_add_, targets, sources)


def _by_dtype(
    kernel: Callable[..., Any], targets: Sequence[Tensor], sources: Sequence[Tensor]
) -> None:
    """Calls ``kernel`` for targets of one dtype and sources of one at a time.

    CUDA's copy in torch 2.6 to 2.10 writes past targets of several
    (https://github.com/pytorch/pytorch/pull/173531), and its kernels are for sources of one.
    """
    if len({*map(_dtype, targets)}) == len({*map(_dtype, sources)}) == 1:
        kernel(list(targets), list(sources))
        return
    lists: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        same_targets, same_sources = lists.setdefault((target.dtype, source.dtype), ([], []))
        same_targets.append(target)
        same_sources.append(source)
    for same_targets, same_sources in lists.values():
        kernel(same_targets, same_sources)


def assign_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies each source into its target, as part of the graph that a source may have."""
    if _are_recorded(sources):  # but the kernel has no derivative
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    else:
        copy_(targets, sources)


def divide_(tensors: Sequence[Tensor], divisors: Sequence[Tensor | None]) -> None:
    """Divides tensors by their 0-d divisors, where there are some, in place.

    One call serves all tensors of one divisor.
    """
    by_divisor: dict[tuple[Tensor, torch.device], list[Tensor]] = {}
    for tensor, divisor in zip(tensors, divisors, strict=True):
        if divisor is not None:
            by_divisor.setdefault((divisor, tensor.device), []).append(tensor)
    for (divisor, device), divided in by_divisor.items():
        torch._foreach_div_(divided, moved(divisor, device))


def _are_recorded(tensors: list[Tensor]) -> bool:
    """Returns whether autograd records what happens to ``tensors``."""
    return torch.is_grad_enabled() and any(map(_has_graph, tensors))


update_scale_: Callable[..., Any] = torch._amp_update_scale_
"""Updates 0-d scale and clean-step count in place by ``found_inf``, without a host sync."""

group: Callable[..., Any] = Optimizer._group_tensors_by_device_and_dtype
"""Groups positions of equally long lists by device and dtype of the first list's tensor."""


# -- fused optimizer kernels; the fallbacks are in `_core.foreach` --------------------------------

fused_adam_: Callable[..., Any] = torch._fused_adam_
fused_adamw_: Callable[..., Any] = torch._fused_adamw_
fused_sgd_: Callable[..., Any] = torch._fused_sgd_
fused_adagrad_: Callable[..., Any] = torch._fused_adagrad_


def has_fused(name: str, device: torch.device) -> bool:
    """Returns whether ``device`` has the fused kernel ``name``, such as ``"fused_adam_"``."""
    key = AUTOCAST_KEYS.get(device.type, "").removeprefix("Autocast")
    return bool(key) and has_kernel(f"aten::_{name}", key)
