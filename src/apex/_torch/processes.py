"""Processes that are being started by ``multiprocessing``, which torch shares memory with."""

from __future__ import annotations

from multiprocessing import context

from torch import Tensor


def is_starting_one() -> bool:
    """Returns whether this thread pickles the arguments of a new process."""
    return context.get_spawning_popen() is not None


def keep(tensor: Tensor) -> None:
    """Keeps a tensor that is pickled for a new process, which reads its memory later."""
    starting = context.get_spawning_popen()
    if starting is not None:
        vars(starting).setdefault("_apex_tensors", []).append(tensor)
