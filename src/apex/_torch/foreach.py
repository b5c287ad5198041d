"""torch's private kernels over lists of tensors, each with a fallback in public torch.

The form is chosen at import, except where a device or dtype lacks the kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex._torch.dispatcher import has_kernel

_BACKENDS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}
_has_graph = operator.attrgetter("requires_grad")


def plain_check_and_unscale_(grads: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Multiplies ``grads`` by 0-d ``inverse`` in place; sets 0-d ``found_inf`` on inf or NaN."""
    for grad in grads:
        bad = torch.logical_not(torch.isfinite(grad).all()).to(found_inf.dtype)
        torch.maximum(found_inf, bad, out=found_inf)
        grad.copy_(grad.to(torch.promote_types(grad.dtype, inverse.dtype)) * inverse)


def plain_update_scale_(
    scale: Tensor,
    clean_steps: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> Tensor:
    """Updates a scale and its clean-step count in place, without a host sync; returns the scale.

    The scale backs off if 0-d ``found_inf`` is set and grows after ``growth_interval`` clean steps,
    unless the result exceeds fp32.
    """
    overflow = found_inf != 0
    steps = torch.where(overflow, 0, clean_steps + 1)
    grows = steps == growth_interval
    # In fp64, as in the kernel: the factors are Python numbers.
    grown, reduced = ((scale.double() * f).float() for f in (growth_factor, backoff_factor))
    grown = torch.where(grows & torch.isfinite(grown), grown, scale)
    scale.copy_(torch.where(overflow, reduced, grown))
    clean_steps.copy_(torch.where(grows, 0, steps))
    return scale


def plain_group(lists: Sequence[Sequence[Tensor]]) -> dict[Any, tuple[list[list[Tensor]], Any]]:
    """Groups positions of equally long lists by device and dtype of the first list's tensor."""
    groups: dict[Any, tuple[list[list[Tensor]], list[int]]] = {}
    for index, tensors in enumerate(zip(*lists, strict=True)):
        key = tensors[0].device, tensors[0].dtype
        parts, indices = groups.setdefault(key, ([[] for _ in lists], []))
        indices.append(index)
        for part, tensor in zip(parts, tensors, strict=True):
            part.append(tensor)
    return groups


_check_and_unscale_kernel_: Callable[..., Any] = getattr(
    torch, "_amp_foreach_non_finite_check_and_unscale_", plain_check_and_unscale_
)


def check_and_unscale_(grads: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Does the same as :func:`plain_check_and_unscale_`, in fewer kernels.

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
        torch._foreach_copy_(wide, grads)
        _check_and_unscale_kernel_(wide, found_inf, inverse)
        torch._foreach_copy_(grads, wide)
    else:
        _check_and_unscale_kernel_(grads, found_inf, inverse)


def assign_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies each source into its target, as part of the graph that a source may have."""
    if _are_recorded(sources):  # but the kernel has no derivative
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    else:
        torch._foreach_copy_(targets, sources)


def _are_recorded(tensors: list[Tensor]) -> bool:
    """Returns whether autograd records what happens to ``tensors``."""
    return torch.is_grad_enabled() and any(map(_has_graph, tensors))


update_scale_: Callable[..., Any] = getattr(torch, "_amp_update_scale_", plain_update_scale_)
group: Callable[..., Any] = getattr(Optimizer, "_group_tensors_by_device_and_dtype", plain_group)


# -- fused optimizer kernels; the fallbacks are in `_core.foreach` --------------------------------

fused_adagrad_ = torch._fused_adagrad_
fused_adam_ = torch._fused_adam_
fused_adamw_ = torch._fused_adamw_
fused_sgd_ = torch._fused_sgd_


def has_fused(name: str, device: torch.device) -> bool:
    """Returns whether ``device`` has the fused kernel ``name``, such as ``"fused_adam_"``."""
    key = _BACKENDS.get(device.type)
    return key is not None and has_kernel(f"aten::_{name}", key)
