"""The local parts of DTensors, which are sharded or replicated over a device mesh."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import torch
from torch import Tensor, distributed

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_MODULE = "torch.distributed.tensor"
"""Used only if a script has imported it: loading it takes a second."""


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Returns whether ``tensor`` is a DTensor."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(tensor, module.DTensor)


def any_dtensor(tensors: Iterable[Tensor]) -> bool:
    """Returns whether any of ``tensors`` is a DTensor."""
    module = sys.modules.get(_MODULE)
    if module is not None:
        for tensor_type in {*map(type, tensors)}:
            if issubclass(tensor_type, module.DTensor):
                return True
    return False


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor, sharing memory, and other tensors unchanged.

    Elementwise operations on the parts give the same result without DTensor's dispatch, which costs
    tens of microseconds per operator and lacks ``_foreach_copy_``.
    """
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():  # to_local shares memory under no_grad
        return tensor.to_local()


def laid_out_as(like: Tensor, tensor: Tensor) -> Tensor:
    """Returns ``tensor`` with the placements of ``like``; reduces partial sums, moves shards.

    Communicates if the placements differ. Unless both are DTensors, returns ``tensor`` unchanged.
    """
    if not (is_dtensor(like) and is_dtensor(tensor)):
        return tensor
    if tensor.device_mesh == like.device_mesh and tensor.placements == like.placements:
        return tensor
    return tensor.redistribute(like.device_mesh, like.placements)


def device_types(tensor: Tensor) -> tuple[str, ...]:
    """Returns the device type of ``tensor``, preceded by its mesh's for a DTensor."""
    here = tensor.device.type
    return (tensor.device_mesh.device_type, here) if is_dtensor(tensor) else (here,)


Group = tuple[str, Any]
"""The ranks along one dimension of a device mesh: the mesh's device type, on which they
communicate, and their process group."""


def groups(params: Sequence[Tensor]) -> list[Group]:
    """Returns the groups of ranks that hold different parts of ``params``, without duplicates.

    There is one per mesh dimension over which a parameter is sharded, in parameter order, which is
    the same on every rank.
    """
    if not any_dtensor(params):
        return []
    by_id: dict[int, Group] = {}
    for param in filter(is_dtensor, params):
        mesh = param.device_mesh
        for dimension, placement in enumerate(param.placements):
            if not placement.is_replicate() and mesh.size(dimension) > 1:
                ranks = mesh.get_group(dimension)
                by_id.setdefault(id(ranks), (mesh.device_type, ranks))
    return list(by_id.values())


@torch.no_grad()
def all_reduce_(value: Tensor, over: Iterable[Group], op: Literal["MAX", "MIN", "SUM"]) -> None:
    """Sets 0-d ``value`` to its maximum, minimum or sum over all ranks of the groups ``over``.

    All these ranks must call it. Waits for the device only if their backend does.
    """
    for device_type, ranks in over:
        # The loss may be on the CPU and the parameters on the device, or the reverse.
        shared = value.clone() if value.device.type == device_type else value.to(device_type)
        distributed.all_reduce(shared, op=getattr(distributed.ReduceOp, op), group=ranks)
        value.copy_(shared)
