"""Rank and world size in ``torch.distributed``, with defaults for a single process."""

from __future__ import annotations

from torch import distributed


def is_running() -> bool:
    """Returns whether the default process group exists."""
    return distributed.is_available() and distributed.is_initialized()


def rank() -> int:
    """Returns this process's rank in the default group, 0 without one."""
    return distributed.get_rank() if is_running() else 0


def world_size() -> int:
    """Returns the size of the default group, 1 without one."""
    return distributed.get_world_size() if is_running() else 1
