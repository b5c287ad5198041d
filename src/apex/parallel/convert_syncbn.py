"""Conversion of a model's batch norms to synchronized batch norms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from apex._core import arguments
from apex._engine.model import is_converted
from apex.parallel.optimized_sync_batchnorm import SyncBatchNorm
from apex.parallel.process_groups import checked_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Module = TypeVar("Module", bound=nn.Module)


def convert_syncbn_model(
    module: Module, process_group: ProcessGroup | None = None, channel_last: bool = False
) -> Module:
    """Replaces every batch norm in ``module`` with a :class:`SyncBatchNorm`.

    Modifies the model in place and returns it: each layer gets another class and stays the same
    object, with its parameters, options, mode and hooks. So the call may come before or after
    ``amp.initialize`` and before or after the creation of an optimizer.

    Args:
        module: Any module.
        process_group: The processes to synchronize; ``None`` for all.
        channel_last: See :class:`SyncBatchNorm`.

    Raises:
        TypeError: If ``module`` is not a module, or ``process_group`` not a process group.
        ValueError: If this process is not in the group, or a layer is uninitialized or has a
            parametrization. In this case, nothing is converted.
        RuntimeError: If ``module`` itself is a batch norm that ``amp.initialize`` has prepared.
    """
    arguments.module("convert_syncbn_model", module)
    group = checked_group(process_group)
    layers = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    for layer in layers:
        _check(layer)
    for layer in layers:
        fuse_relu = isinstance(layer, SyncBatchNorm) and layer.fuse_relu
        synced: Any = layer
        synced.__class__ = SyncBatchNorm
        synced.process_group, synced.channel_last, synced.fuse_relu = group, channel_last, fuse_relu
    return module


def _check(layer: _BatchNorm) -> None:
    name = type(layer).__name__
    if is_converted(layer):
        raise RuntimeError(
            f"convert_syncbn_model got a {name} that amp.initialize has prepared on its own. "
            "Call convert_syncbn_model first, or prepare a model that contains the layer."
        )
    tensors = *layer.parameters(), *layer.buffers()
    if any(map(is_lazy, tensors)) or "parametrizations" in layer._modules:
        raise ValueError(
            f"convert_syncbn_model got a {name} that is not initialized yet or has a "
            "parametrization. Run one batch through the model first, and convert before you "
            "register parametrizations."
        )
