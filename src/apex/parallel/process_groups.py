"""Checks of process groups, and process groups for synchronized norms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from apex._core import arguments
from apex._torch import ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def checked_group(group: Any) -> ProcessGroup | None:
    """Returns ``group`` after checking that this process can communicate in it.

    Args:
        group: A process group that contains this process; ``None`` means all processes.

    Raises:
        TypeError: If ``group`` is not a process group, or this process is not in it.
    """
    if group is not None and not isinstance(group, torch.distributed.ProcessGroup):
        raise TypeError(
            f"process_group is {group!r}; it takes a group that contains this process, as "
            "create_syncbn_process_group(group_size) returns it, or None for all processes."
        )
    return group


def syncing_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """Returns the group for communication; ``None`` if it is the only process."""
    if not ranks.is_running():
        return None
    chosen = torch.distributed.group.WORLD if group is None else group
    if chosen is None or torch.distributed.get_world_size(chosen) == 1:
        return None
    return chosen


def create_syncbn_process_group(group_size: int) -> ProcessGroup | None:
    """Returns the group of ``group_size`` processes with which this one synchronizes its norms.

    Groups consist of consecutive ranks: 0 to ``group_size - 1``, and so on. Every process must call
    this function.

    Args:
        group_size: Processes per group; must divide the number of processes. 0 returns None, which
            means all processes.

    Raises:
        ValueError: If ``group_size`` does not divide the number of processes, or torch.distributed
            is not initialized.
    """
    if group_size == 0:
        return None
    arguments.integer("group_size", group_size, least=0)
    group: ProcessGroup
    group, _ = torch.distributed.new_subgroups(group_size)  # type: ignore[no-untyped-call]
    return group
