"""Which processes work together: checks of process groups, and groups for synchronized norms."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from apex._torch import ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def require_running(name: str) -> None:
    """Raises where there is no default process group.

    Args:
        name: What needs one.

    Raises:
        RuntimeError: If torch.distributed is not initialized.
    """
    if not ranks.is_running():
        raise RuntimeError(
            f"{name} needs a process group, and this process is in none. Start the script with "
            "torchrun and call torch.distributed.init_process_group(backend) first ('nccl' on "
            "GPUs, 'gloo' on CPUs)."
        )


def checked_group(group: Any) -> ProcessGroup | None:
    """Returns ``group``, or raises where it is nothing to communicate in.

    Args:
        group: A process group that this process is in; ``None`` means all processes.

    Raises:
        TypeError: If it is no process group.
        ValueError: If this process is not in it.
    """
    if group is None:
        return None
    distributed = torch.distributed
    if distributed.is_available():
        if isinstance(group, distributed.ProcessGroup):
            return group
        if group is distributed.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "process_group is one that this process is not in. Give every process the group "
                "that it belongs to, as create_syncbn_process_group(group_size) returns it."
            )
    raise TypeError(
        f"process_group is {group!r}; it takes what torch.distributed.new_group(ranks) or "
        "create_syncbn_process_group(group_size) returns, or None for all processes."
    )


def syncing_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """Returns the group to communicate in; ``None`` where this process is alone."""
    if not ranks.is_running():
        return None
    chosen = torch.distributed.group.WORLD if group is None else group
    if chosen is None or torch.distributed.get_world_size(chosen) == 1:
        return None
    return chosen


def require_same_parameters(
    name: str, params: Sequence[Tensor], group: ProcessGroup | None = None
) -> None:
    """Raises in every process of ``group`` where they hold different parameters.

    What communicates them afterwards would hang, or mix them up.

    Args:
        name: What got the parameters.
        params: Those of this process.
        group: The processes; ``None`` for all.

    Raises:
        RuntimeError: If number, order, shapes or dtypes differ.
    """
    layout = repr([(tuple(param.shape), param.dtype) for param in params]).encode()
    device = params[0].device if params else None
    own = torch.tensor([zlib.crc32(layout)], dtype=torch.int64, device=device)
    every = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(every, own, group=group)
    codes = torch.cat(every).tolist()  # sync: once, at construction
    others = [rank for rank, code in enumerate(codes) if code != codes[0]]
    if others:
        raise RuntimeError(
            f"{name} got modules whose parameters differ in number, shape or dtype between rank 0 "
            f"and ranks {others} of the group. Build the same module in every process."
        )


def create_syncbn_process_group(group_size: int) -> ProcessGroup | None:
    """Returns the group of ``group_size`` processes that this one synchronizes its norms with.

    Processes are grouped by rank: 0 to ``group_size - 1``, and so on. Every process must call it.

    Args:
        group_size: Processes in a group; divides the number of all. 0 means all, as ``None``.

    Raises:
        ValueError: If ``group_size`` does not divide the number of processes.
        RuntimeError: If torch.distributed is not initialized.
    """
    if group_size == 0:
        return None
    require_running("create_syncbn_process_group")
    world_size = torch.distributed.get_world_size()
    if group_size < 0 or world_size % group_size != 0:
        raise ValueError(
            f"group_size is {group_size}; it must divide the number of processes, {world_size}. "
            "0 synchronizes over all of them."
        )
    own = torch.distributed.get_rank() // group_size
    # torch wants every process to take part in making every group.
    groups = [
        torch.distributed.new_group(range(first, first + group_size))
        for first in range(0, world_size, group_size)
    ]
    return checked_group(groups[own])
