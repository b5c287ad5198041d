"""The casts of sessions in the threads that began them.

Note [Ambient casts]
    A session turns autocast on in the thread that called ``initialize``. When the session ends
    there, the state from before it returns at once. A ``torch.autocast`` block around that point
    restores the switch at its end, and another thread cannot set it; so the next forward or amp
    call of the thread does. Casts that began in a ``torch.autocast`` block end with it.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from contextlib import AbstractContextManager

import torch

from apex._core.op_table import AutocastSpec
from apex._engine.autocast import kernels
from apex._torch.autograd import autocast_depth, backward_id
from apex._torch.dynamo import is_compiling_here, untraced


class Ambient:
    """Casts that are on in this thread until their end; of several, the newest apply.

    Attributes:
        before: The switch and dtype of each device type before them.
        alive: Whether they go on; any thread may set it to False.
    """

    def __init__(self, spec: AutocastSpec) -> None:
        _end_in_forks()
        settle()
        self.dtype, self.depth, self.alive = spec.dtype, autocast_depth(), True
        self.before = {
            device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in spec.device_types
        }
        if not _here.ambients:
            _here.cache = torch.is_autocast_cache_enabled()
        # No weight cache outside of regions, where changes of weights go unnoticed.
        torch.set_autocast_cache_enabled(False)
        for device in self.before:
            _switch(device, True, spec.dtype)
        _here.ambients.append(self)

    def end(self) -> None:
        """Ends them as soon as their thread can; idempotent, and safe in any thread."""
        self.alive = False
        settle()

    def can_end(self) -> bool:
        """Returns whether nothing around restores the switch: a block, a pass, dynamo, an operator.

        An operator turns the switch off for its inside.
        """
        depth = autocast_depth()
        if depth > self.depth or backward_id() != -1 or is_compiling_here():
            return False
        return depth < self.depth or all(map(torch.is_autocast_enabled, self.before))

    def restore(self) -> None:
        """Restores the switches that are still theirs, or leaves that to newer casts."""
        newer = _here.ambients[_here.ambients.index(self) + 1 :]
        for device, was in self.before.items():
            above = next((other for other in newer if device in other.before), None)
            if above is not None:
                above.before[device] = was
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            if dtype is self.dtype and (above is None or above.dtype is not dtype):
                _switch(device, *was)
        _here.ambients.remove(self)
        if not _here.ambients:
            torch.set_autocast_cache_enabled(_here.cache)


class _Thread(threading.local):
    cache = True  # the switch of the weight cache before the first

    def __init__(self) -> None:
        self.ambients: list[Ambient] = []  # oldest first
        self.steps: list[AbstractContextManager[object]] = []  # outermost first


_here = _Thread()


def _switch(device: str, on: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled(device, on)
    torch.set_autocast_dtype(device, dtype)


def uncast_steps() -> list[AbstractContextManager[object]]:
    """Returns the steps that turned casts off in this thread and have not ended."""
    return _here.steps


@untraced
def settle() -> None:
    """Ends this thread's casts of sessions that have ended, and steps that raised."""
    while _here.steps:
        _here.steps.pop().__exit__(None, None, None)
    ended = [ambient for ambient in _here.ambients if not ambient.alive]
    for ambient in ended:
        if ambient.can_end():
            ambient.restore()
    if ended:
        kernels.tag_caches()


@functools.cache
def _end_in_forks() -> None:
    """Ends casts in forked processes: a data loader's results must not depend on its start."""
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=_end_all)


def _end_all() -> None:
    for ambient in [*_here.ambients]:
        ambient.end()
