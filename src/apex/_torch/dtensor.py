"""DTensors, which are sharded or replicated over a device mesh, and the values of gradients."""

from __future__ import annotations

import operator
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, distributed

from apex._torch.parameters import grad_of
from apex._torch.sparse import stored_values

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_MODULE = "torch.distributed.tensor"
"""Used only if a script has imported it: loading it takes a second."""

_layout = operator.attrgetter("layout")


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Returns whether ``tensor`` is a DTensor."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(tensor, module.DTensor)


def any_dtensor(tensors: Iterable[Tensor]) -> bool:
    """Returns whether any of ``tensors`` is a DTensor."""
    module = sys.modules.get(_MODULE)
    if module is not None:
        for tensor_class in {*map(type, tensors)}:  # faster than to ask each tensor
            if issubclass(tensor_class, module.DTensor):
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
    if tensor.placements == like.placements:
        return tensor
    return tensor.redistribute(placements=like.placements)


def share_flag_(flag: Tensor, params: Collection[Tensor]) -> None:
    """Sets 0-d ``flag`` to its maximum over all ranks that hold parts of ``params``.

    All these ranks must call it. Waits for the device only if their backend does.
    """
    if not any_dtensor(params):
        return
    # Of ranks with different parts of a parameter, and the device type on which they communicate;
    # in parameter order, which is the same on every rank.
    groups: dict[Any, str] = {}
    for param in filter(is_dtensor, params):
        mesh = param.device_mesh
        for dimension, placement in enumerate(param.placements):
            if not placement.is_replicate() and mesh.size(dimension) > 1:
                groups[mesh.get_group(dimension)] = mesh.device_type
    for group, device_type in groups.items():
        shared = flag
        if flag.device.type != device_type:  # the loss is on the CPU, or the parameters are
            shared = flag.to(device_type)
        distributed.all_reduce(shared, op=distributed.ReduceOp.MAX, group=group)
        flag.copy_(shared)


# -- gradients ------------------------------------------------------------------------------------


def are_plain(grads: Sequence[Tensor]) -> bool:
    """Returns whether ``grads`` are dense, and none of them a DTensor."""
    return {*map(_layout, grads)} <= {torch.strided} and not any_dtensor(grads)


def dense_values(grads: list[Tensor]) -> list[Tensor]:
    """Returns dense tensors that share memory with ``grads``: sparse values, DTensors' local parts.

    Coalesce sparse gradients and reduce DTensor gradients over their ranks first: a sum of finite
    values may overflow, and a check must see the sum.
    """
    if are_plain(grads):
        return grads
    values = map(local, grads)
    return [stored_values(value) if value.is_sparse else value for value in values]


def values_of(params: Collection[Tensor]) -> list[Tensor]:
    """Returns the :func:`dense_values` of the parameters' gradients.

    Replaces sparse gradients by coalesced ones before, and partial ones by reduced ones.
    """
    grads = [grad for grad in map(grad_of, params) if grad is not None]
    if are_plain(grads):
        return grads
    grads = []
    for param in params:
        if param.grad is not None:
            summed = laid_out_as(param, param.grad)
            param.grad = summed.coalesce() if summed.is_sparse else summed
            grads.append(param.grad)
    return dense_values(grads)


def summed_values(grad: Tensor) -> Tensor:
    """Returns a sparse gradient's values with duplicate rows summed, others unchanged."""
    return grad.coalesce().values() if grad.is_sparse else grad
