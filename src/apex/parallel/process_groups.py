"""Checks of process groups, and process groups for synchronized norms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from apex._core import arguments
from apex._torch import ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def require_running(name: str) -> None:
    """Raises RuntimeError, naming the caller, if torch.distributed is not initialized."""
    if not ranks.is_running():
        raise RuntimeError(
            f"{name} needs a process group, but torch.distributed is not initialized. Start the "
            "script with torchrun and call torch.distributed.init_process_group(backend) first "
            "('nccl' on GPUs, 'gloo' on CPUs)."
        )


def checked_group(group: Any) -> ProcessGroup | None:
    """Returns ``group`` after checking that this process can communicate in it.

    Args:
        group: A process group that contains this process; ``None`` means all processes.

    Raises:
        TypeError: If ``group`` is not a process group.
        ValueError: If this process is not in it.
    """
    if group is None or isinstance(group, torch.distributed.ProcessGroup):
        return group
    if group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "process_group does not contain this process. Pass every process its own group, as "
            "create_syncbn_process_group(group_size) returns it."
        )
    raise TypeError(
        f"process_group is {group!r}; it takes the result of torch.distributed.new_group(ranks) "
        "or create_syncbn_process_group(group_size), or None for all processes."
    )


def syncing_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """Returns the group for communication; ``None`` if this process is alone."""
    if not ranks.is_running():
        return None
    chosen = torch.distributed.group.WORLD if group is None else group
    if chosen is None or torch.distributed.get_world_size(chosen) == 1:
        return None
    return chosen


def create_syncbn_process_group(group_size: int) -> ProcessGroup | None:
    """Returns the group of ``group_size`` processes whose norms this process synchronizes with.

    Groups consist of consecutive ranks: 0 to ``group_size - 1``, and so on. Every process must call
    this function.

    Args:
        group_size: Processes per group; must divide the number of processes. 0 returns None, which
            means all processes.

    Raises:
        ValueError: If ``group_size`` does not divide the number of processes.
        RuntimeError: If torch.distributed is not initialized.
    """
    if group_size == 0:
        return None
    require_running("create_syncbn_process_group")
    world_size = torch.distributed.get_world_size()
    arguments.integer("group_size", group_size, least=0)
    if world_size % group_size != 0:
        raise ValueError(
            f"group_size is {group_size}; it must divide the number of processes, {world_size}. "
            "0 synchronizes over all of them."
        )
    own: ProcessGroup
    own, _ = torch.distributed.new_subgroups(group_size)  # type: ignore[no-untyped-call]
    return own
