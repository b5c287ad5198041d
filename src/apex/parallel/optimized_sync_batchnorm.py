"""Batch norm with statistics over all processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.modules._functions import SyncBatchNorm as TorchSyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from apex._core import dtypes
from apex.parallel.process_groups import checked_group, syncing_group
from apex.parallel.sync_batch_norm_function import sync_batch_norm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class _SharedGroup:
    """Holds a process group, which cannot be copied: copies of a layer share it."""

    group: ProcessGroup | None

    def __deepcopy__(self, memo: dict[int, Any]) -> _SharedGroup:
        return self


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
        warned: As in apex, where it marked that the slow form had been reported; changes nothing.

    Raises:
        TypeError: If ``process_group`` is not a process group.
        ValueError: If this process is not in the group.
    """

    warned: ClassVar[bool] = False

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
        group = checked_group(process_group)
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self._group = _SharedGroup(group)
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    @property
    def process_group(self) -> ProcessGroup | None:
        """The processes to synchronize; ``None`` for all."""
        return self._group.group

    @process_group.setter
    def process_group(self, value: ProcessGroup | None) -> None:
        self._group = _SharedGroup(checked_group(value))

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:  # noqa: A002 - apex's
        """Returns the normalized input.

        Args:
            input: ``[N, C]``, ``[N, C, ...]``, or ``[N, ..., C]`` with ``channel_last``.
            z: Tensor added before the ReLU (a residual connection).

        Raises:
            TypeError: If the input does not have a floating-point dtype.
            ValueError: If its shape does not match, or it has one value per channel in training.
        """
        self._check(input)
        if self.channel_last and input.dim() > 2:
            output = self._normalized(input.movedim(-1, 1)).movedim(1, -1)
        else:
            output = self._normalized(input)
        if z is not None:
            output = output + z
        return torch.relu(output) if self.fuse_relu else output

    def _normalized(self, x: Tensor) -> Tensor:
        group = syncing_group(self.process_group) if self.training else None
        if group is None:
            return super().forward(x)
        running = self._running()
        if x.is_cuda:
            mean, var, share = running or (None, None, 0.0)
            size = torch.distributed.get_world_size(group)
            args = (self.weight, self.bias, mean, var, self.eps, share, group, size)
            output: Tensor = TorchSyncBatchNorm.apply(x, *args)  # type: ignore[no-untyped-call]
        else:
            output = sync_batch_norm(x, self.weight, self.bias, running, self.eps, group)
        if running is not None and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return output

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's
        """Accepts what `forward` has checked."""

    def _running(self) -> tuple[Tensor, Tensor, float] | None:
        """Returns the running statistics to update and their momentum; None without any."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return None
        momentum = self.momentum
        if momentum is None and self.num_batches_tracked is not None:
            # sync: torch's batch_norm takes a host number
            momentum = 1.0 / (int(self.num_batches_tracked) + 1)
        return self.running_mean, self.running_var, momentum or 0.0

    def _check(self, x: Tensor) -> None:
        if not dtypes.is_castable(x):
            raise TypeError(
                f"SyncBatchNorm got an input of {x.dtype}; it takes float16, bfloat16, float32 "
                "and float64."
            )
        dim = -1 if self.channel_last else 1
        if x.dim() < 2 or x.size(dim) != self.num_features:
            place = "last" if self.channel_last else "second"
            raise ValueError(
                f"SyncBatchNorm got an input of shape {tuple(x.shape)}; it takes rank 2 or more "
                f"with {self.num_features} channels as the {place} dimension "
                f"(channel_last={self.channel_last})."
            )

    def extra_repr(self) -> str:
        """Returns the options."""
        shown: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{shown}, channel_last={self.channel_last}, fuse_relu={self.fuse_relu}"
