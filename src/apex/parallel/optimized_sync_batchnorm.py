"""Batch norm with statistics over all processes, and conversion of a model's batch norms."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as TorchSyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from apex._core import arguments, dtypes
from apex._engine.conversion.state import is_converted
from apex._torch.modules import modules_in
from apex.parallel.process_groups import checked_group, syncing_group
from apex.parallel.sync_batch_norm_function import sync_batch_norm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Module = TypeVar("Module", bound=nn.Module)


class SyncBatchNorm(_BatchNorm):
    """Batch norm that, in training, normalizes over the combined batch of several processes.

    Supports any device, any floating-point dtype (also 16-bit inputs with fp32 parameters) and any
    input of rank 2 or more. Batch sizes may differ between processes. In evaluation, without a
    process group, or in a group of one, it is plain batch norm without communication. In training,
    every process must call it equally often.

    Args:
        num_features: Number of channels, ``C``.
        eps: Term added to the variance.
        momentum: Weight of a new batch in the running statistics; ``None`` for a plain average.
        affine: Whether the layer has a weight and a bias.
        track_running_stats: Whether to keep running statistics; without them, evaluation uses the
            statistics of this process's batch.
        process_group: The processes to synchronize; ``None`` for all.
        channel_last: Whether the last dimension of the input is the channels, instead of the
            second.
        fuse_relu: Whether to apply a ReLU to the output.

    Attributes:
        warned: Always False. apex set it after a warning about its slow implementation.

    Raises:
        TypeError: If ``process_group`` is not a process group that contains this process.
    """

    warned = False
    fuse_relu = False

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: ProcessGroup | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = checked_group(process_group)
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:  # noqa: A002 - apex's
        """Returns the normalized input.

        Args:
            input: ``[N, C]``, ``[N, C, ...]``, or ``[N, ..., C]`` with ``channel_last``.
            z: Tensor added before the ReLU (a residual connection).

        Raises:
            ValueError: If dtype or shape of ``input`` does not match, or ``input`` has one value
                per channel in training.
        """
        dim = -1 if self.channel_last else 1
        fits = input.dim() > 1 and input.size(dim) == self.num_features
        if not fits or not dtypes.is_castable(input):
            raise ValueError(
                f"SyncBatchNorm got {input.dtype} of shape {tuple(input.shape)}; it takes floating "
                f"point of rank 2 or more with {self.num_features} channels as dimension {dim} "
                f"(channel_last={self.channel_last})."
            )
        channels_second = input.movedim(dim, 1)
        output = self._normalized(channels_second).movedim(1, dim)
        if z is not None:
            output = output + z
        return torch.relu(output) if self.fuse_relu else output

    def _normalized(self, x: Tensor) -> Tensor:
        """Returns the normalized ``[N, C, ...]``; updates the running statistics in training."""
        group = syncing_group(self.process_group) if self.training else None
        if group is None:
            return super().forward(x)
        running_mean = None
        running_var = None
        batches = None
        if self.track_running_stats:
            running_mean = self.running_mean
            running_var = self.running_var
            batches = self.num_batches_tracked
        momentum = self.momentum or 0.0
        if self.momentum is None and batches is not None:
            momentum = 1.0 / (int(batches) + 1)  # sync: torch's batch_norm takes a host number
        args = (self.weight, self.bias, running_mean, running_var, self.eps, momentum, group)
        if x.is_cuda:
            size = torch.distributed.get_world_size(group)
            # Without values, torch's function sends 16-bit statistics, and other ranks fp32 ones.
            given = x.float() if x.numel() == 0 and dtypes.is_low_precision(x) else x
            applied: Tensor = TorchSyncBatchNorm.apply(given, *args, size)  # type: ignore[no-untyped-call]
            output = applied.to(x.dtype)
        else:
            output = sync_batch_norm(x, *args)
        if batches is not None:
            batches.add_(1)
        return output

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's
        """Accepts what `forward` has checked."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """Copies everything except the process group, which the copies share."""
        copied = type(self).__new__(type(self))
        # deepcopy returns the entries of memo instead of copying these objects again.
        memo[id(self)] = copied
        memo[id(self.process_group)] = self.process_group
        attributes = copy.deepcopy(vars(self), memo)
        vars(copied).update(attributes)
        return copied

    def extra_repr(self) -> str:
        """Returns the options."""
        shown: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{shown}, channel_last={self.channel_last}, fuse_relu={self.fuse_relu}"


def convert_syncbn_model(
    module: Module,
    process_group: ProcessGroup | None = None,
    channel_last: bool = False,
) -> Module:
    """Replaces every batch norm in ``module`` with a :class:`SyncBatchNorm`.

    Modifies the model in place and returns it. Each layer gets another class but stays the same
    object, with its parameters, options, mode and hooks. Therefore the call may come before or
    after ``amp.initialize``, and before or after the creation of an optimizer.

    Args:
        module: Any module.
        process_group: The processes to synchronize; ``None`` for all.
        channel_last: See :class:`SyncBatchNorm`.

    Raises:
        TypeError: If ``module`` is not a module, or ``process_group`` is not a process group that
            contains this process.
        ValueError: If a layer has a parametrization, or ``module`` itself is a batch norm that
            ``amp.initialize`` has prepared. In this case, nothing is converted.
    """
    arguments.module("convert_syncbn_model", module)
    group = checked_group(process_group)
    layers = [part for part in modules_in(module) if isinstance(part, _BatchNorm)]
    for layer in layers:
        if is_converted(layer) or "parametrizations" in layer._modules:
            raise ValueError(
                f"convert_syncbn_model got a {type(layer).__name__} that amp.initialize has "
                "prepared on its own, or with a parametrization. Call it before either."
            )
    for layer in layers:
        synced: Any = layer
        synced.__class__ = SyncBatchNorm
        synced.process_group = group
        synced.channel_last = channel_last
    return module
