"""Conversion of a model's batch norms to synchronized batch norms."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

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

    Modifies the model in place and returns it; only if ``module`` itself is a batch norm does it
    return a new layer. Parameters and buffers stay the same objects, so the call may come before or
    after ``amp.initialize`` and before or after the creation of an optimizer. Layers keep their
    options, mode and hooks, and shared layers stay shared.

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
    fresh = {layer: _synchronized(layer, group, channel_last) for layer in layers}
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, _BatchNorm):
                parent._modules[name] = fresh[child]
    if isinstance(module, _BatchNorm):
        return fresh[layers[0]]  # type: ignore[return-value]
    return module


def _check(layer: _BatchNorm) -> None:
    kind = type(layer).__name__
    if is_converted(layer):
        raise RuntimeError(
            f"convert_syncbn_model got a {kind} that amp.initialize has prepared on its own. "
            "Call convert_syncbn_model first, or prepare a model that contains the layer."
        )
    if any(is_lazy(tensor) for tensor in (*layer.parameters(), *layer.buffers())):
        raise ValueError(
            f"convert_syncbn_model got a {kind} that is not initialized yet. Run one batch through "
            "the model first to determine its shapes."
        )
    if "parametrizations" in layer._modules:
        raise ValueError(
            f"convert_syncbn_model got a {kind} with a parametrization, which a SyncBatchNorm "
            "would lose. Convert first, then register the parametrization."
        )


def _synchronized(
    layer: _BatchNorm, group: ProcessGroup | None, channel_last: bool
) -> SyncBatchNorm:
    result = SyncBatchNorm(
        layer.num_features,
        layer.eps,
        layer.momentum,
        affine=False,
        track_running_stats=False,
        process_group=group,
        channel_last=channel_last,
        fuse_relu=isinstance(layer, SyncBatchNorm) and layer.fuse_relu,
    )
    own = {name: result.__dict__[name] for name in ("_group", "channel_last", "fuse_relu")}
    # Everything else is shared, including hooks and their handles. Copies of the tables of tensors
    # keep the old layer independent, in case the script still uses it.
    tables = {name: dict(layer.__dict__[name]) for name in ("_parameters", "_buffers", "_modules")}
    kept = {name: value for name, value in vars(layer).items() if name != "process_group"}
    result.__dict__.update({**kept, **tables, **own})
    return result
