"""Private functions of torch that several files need, each with a plain form where one can be.

Which form is used is decided here, at import. ``tests/test_torch_interface.py`` lists every other
private name that the sources use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode


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
    """Moves a scale and its count of clean steps in place, without a host sync; returns the scale.

    It backs off where 0-d ``found_inf`` is set and grows after ``growth_interval`` clean steps,
    unless fp32 cannot hold the result.
    """
    overflow = found_inf != 0
    steps = torch.where(overflow, 0, clean_steps + 1)
    grows = steps == growth_interval
    grown = scale * growth_factor
    grown = torch.where(grows & torch.isfinite(grown), grown, scale)
    scale.copy_(torch.where(overflow, scale * backoff_factor, grown))
    clean_steps.copy_(torch.where(grows, 0, steps))
    return scale


def plain_group(lists: Sequence[Sequence[Tensor]]) -> dict[Any, tuple[list[list[Tensor]], Any]]:
    """Returns lists of equal length in parts whose first tensors have one device and dtype."""
    groups: dict[Any, tuple[list[list[Tensor]], list[int]]] = {}
    for index, tensors in enumerate(zip(*lists, strict=True)):
        key = tensors[0].device, tensors[0].dtype
        parts, indices = groups.setdefault(key, ([[] for _ in lists], []))
        indices.append(index)
        for part, tensor in zip(parts, tensors, strict=True):
            part.append(tensor)
    return groups


def plain_flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Returns one 1-d tensor with the elements of dense tensors of one dtype."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def plain_unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns views of ``flat`` in the shapes of ``tensors``."""
    parts = torch.split_with_sizes(flat, [tensor.numel() for tensor in tensors])
    return tuple(part.view(like.shape) for part, like in zip(parts, tensors, strict=True))


def _not_in_backward() -> int:
    return -1


def _found(owner: object, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    return getattr(owner, name, plain)


check_and_unscale_ = _found(
    torch, "_amp_foreach_non_finite_check_and_unscale_", plain_check_and_unscale_
)
update_scale_ = _found(torch, "_amp_update_scale_", plain_update_scale_)
group = _found(Optimizer, "_group_tensors_by_device_and_dtype", plain_group)
flatten = _found(torch._utils, "_flatten_dense_tensors", plain_flatten)
unflatten = _found(torch._utils, "_unflatten_dense_tensors", plain_unflatten)

# Without it a backward pass cannot be told from other code: then none is assumed.
backward_id: Callable[[], int] = _found(torch._C, "_current_graph_task_id", _not_in_backward)
"""Returns the number of autograd's backward pass that calls in this thread, -1 outside of one."""

# No plain form: a mode that stayed behind would slow down every call of torch's.
push_function_mode: Callable[[TorchFunctionMode], None] = torch.overrides._push_mode
"""Makes this thread's calls of torch's functions go through a mode."""


def function_modes() -> int:
    """Returns how many function modes this thread is in."""
    return torch._C._len_torch_function_stack()


def leave_function_modes(count: int) -> None:
    """Leaves the newest modes until ``count`` are left; may be called again."""
    while function_modes() > count:
        torch.overrides._pop_mode()  # type: ignore[no-untyped-call]
