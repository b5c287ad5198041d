"""The autocast switches of a thread, casts of sessions that began in it, and steps without them.

Note [Ambient casts]
    A session turns autocast on in the thread that called ``initialize``. At each depth of
    ``torch.autocast`` blocks, the switch is that of the newest live session that began there;
    without one, it is as before the first of them. The end of a block restores the switch, so the
    casts that began in the block end with it. A block of another device type leaves the switch on:
    then they continue outside.

    A session may end inside a block, or in another thread, which cannot set the switch. So the next
    forward or amp call of the thread does.

Note [Steps that raise]
    Casts of sessions are off in steps of optimizers that amp has not prepared, too. torch calls no
    hook after a step that raised an exception. Casts then stay off until the next forward or amp
    call of the thread.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import Optimizer

from apex._core.op_table import AutocastSpec
from apex._engine.autocast import kernels
from apex._torch.autograd import autocast_depth, backward_id
from apex._torch.dispatcher import AUTOCAST_KEYS
from apex._torch.dynamo import is_compiling_here, untraced

OFF = torch.float32
"""The CPU's autocast dtype in ``casts_off``, which no region uses.

By it, regions inside stay off: also those that torch.utils.checkpoint recomputes, that run in
autograd's threads, or that dynamo traces, for all of which torch carries the dtype along.
"""

State = tuple[bool, torch.dtype]
"""Whether autocast is on for a device type, and its dtype."""

_DEVICE_TYPES = tuple(AUTOCAST_KEYS)


def is_off() -> bool:
    """Returns whether this thread is in a ``casts_off`` block."""
    return torch.get_autocast_dtype("cpu") is OFF


def devices_on() -> list[str]:
    """Returns the device types whose autocast is on in this thread."""
    return [*filter(torch.is_autocast_enabled, _DEVICE_TYPES)]


class UncastBlock:
    """Turns casts off in this thread, without a trace of dynamo's. Its exit is idempotent."""

    devices = staticmethod(devices_on)
    """Returns the device types whose casts are turned off."""

    _on: Sequence[str] = ()

    @untraced
    def __enter__(self) -> None:
        self._on = self.devices()
        for device in self._on:
            torch.set_autocast_enabled(device, False)

    @untraced
    def __exit__(self, *error: object) -> None:
        on, self._on = self._on, ()
        for device in on:
            torch.set_autocast_enabled(device, True)


class Ambient:
    """Casts of a session that are on in this thread until their end.

    In a ``casts_off`` block they do not begin.

    Attributes:
        alive: Whether they go on; any thread may set it to False.
    """

    def __init__(self, spec: AutocastSpec) -> None:
        _end_in_forks()
        end_stale_casts()
        self.alive = True
        self.spec = spec
        if is_off():
            return
        depth = autocast_depth()
        _leave_blocks(depth)
        level = _here.levels.get(depth)
        if level is None or not any(map(level.applies, level.bases)):  # one of an earlier block
            level = _Level()
        level.begin(self)
        _here.levels[depth] = level

    def end(self) -> None:
        """Ends them as soon as their thread can; idempotent, and safe in any thread."""
        self.alive = False
        end_stale_casts()


class _Level:
    """The casts that began at one depth of blocks."""

    def __init__(self) -> None:
        self.ambients: list[Ambient] = []  # oldest first
        self.bases: dict[str, State] = {}  # before the first of each device type
        self.cache = torch.is_autocast_cache_enabled()

    def begin(self, ambient: Ambient) -> None:
        self.ambients.append(ambient)
        for device in ambient.spec.device_types:
            self.bases.setdefault(device, _state(device))
            _switch(device, self.state(device))
        # No weight cache outside of regions, where changes of weights go unnoticed.
        torch.set_autocast_cache_enabled(False)

    def state(self, device: str) -> State:
        """Returns the state of a device type: by the newest casts, or as before them."""
        for ambient in reversed(self.ambients):
            if device in ambient.spec.device_types:
                return True, ambient.spec.dtype
        return self.bases[device]

    def applies(self, device: str) -> bool:
        """Returns whether the state is as these casts set it."""
        return device in self.bases and _state(device) == self.state(device)

    def end_stale(self) -> None:
        """Removes casts that have ended, and sets the switches that nobody else has set."""
        set_here = [device for device in self.bases if self.applies(device)]
        self.ambients = [ambient for ambient in self.ambients if ambient.alive]
        for device in set_here:
            _switch(device, self.state(device))
        live = {device for ambient in self.ambients for device in ambient.spec.device_types}
        self.bases = {device: base for device, base in self.bases.items() if device in live}
        if not live:
            torch.set_autocast_cache_enabled(self.cache)


class _Thread(threading.local):
    run_depth = -1
    """The depth of blocks in the innermost run of a region."""

    def __init__(self) -> None:
        self.levels: dict[int, _Level] = {}  # by depth of blocks
        self.steps: list[_UncastStep] = []  # outermost first


_here = _Thread()


def begin_run(until: ExitStack) -> None:
    """Notes that a region has opened its blocks, until ``until`` closes."""
    until.callback(setattr, _here, "run_depth", _here.run_depth)
    _here.run_depth = autocast_depth()


def devices_of_sessions() -> list[str]:
    """Returns the device types whose autocast is on as sessions set it, not a user's own block."""
    return [device for device in devices_on() if _is_of_session(device)]


def _is_of_session(device: str) -> bool:
    depth = autocast_depth()
    if depth == _here.run_depth:
        return True
    if depth in _here.levels:
        return _here.levels[depth].applies(device)
    # torch.utils.checkpoint recomputes in a block of its own, with the state of the forward.
    return backward_id() != -1 and not torch.is_autocast_cache_enabled()


class _UncastStep(UncastBlock):
    """A step, without its closure, of an optimizer that amp has not prepared."""

    devices = staticmethod(devices_of_sessions)

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __enter__(self) -> None:
        super().__enter__()
        _here.steps.append(self)

    def __exit__(self, *error: object) -> None:
        if self in _here.steps:  # an amp call inside the step may have ended it
            _here.steps.remove(self)
            super().__exit__()

    def with_casts(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Returns ``closure`` with the casts from around the step."""

        def evaluate() -> Any:
            self.__exit__()
            try:
                return closure()
            finally:
                self.__enter__()

        return evaluate


def begin_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Begins a step without casts; returns its arguments if they hold a closure."""
    step = _UncastStep(optimizer)
    step.__enter__()
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": step.with_casts(kwargs["closure"])}
    if len(args) > 1 and callable(args[1]):
        itself, closure, *others = args
        return (itself, step.with_casts(closure), *others), kwargs
    return None


def end_step(optimizer: Optimizer) -> None:
    """Ends the innermost step of an optimizer, and those inside it that raised."""
    if all(step.optimizer is not optimizer for step in _here.steps):
        return  # an amp call inside the step has ended it
    ended: Optimizer | None = None
    while ended is not optimizer:
        step = _here.steps[-1]
        step.__exit__()
        ended = step.optimizer


@untraced
def end_stale_casts() -> None:
    """Ends this thread's casts of sessions that have ended, and steps that raised."""
    while _here.steps:
        _here.steps[-1].__exit__()
    stale = False
    for level in _here.levels.values():
        for ambient in level.ambients:
            stale = stale or not ambient.alive
    if not stale:
        return
    kernels.tag_caches()
    # A pass and dynamo restore the switch at their end.
    if backward_id() != -1 or is_compiling_here():
        return
    depth = autocast_depth()
    _leave_blocks(depth)
    # An operator turns the switch off for its inside.
    if depth in _here.levels and all(map(torch.is_autocast_enabled, _here.levels[depth].bases)):
        _here.levels[depth].end_stale()
        if not _here.levels[depth].ambients:
            del _here.levels[depth]


def _leave_blocks(depth: int) -> None:
    """Forgets casts that ended with their block; continues those that the block left on."""
    for deeper in [inside for inside in _here.levels if inside > depth]:
        left = _here.levels.pop(deeper)
        outer = _here.levels.get(depth)
        for device in left.bases:
            goes_on = depth == 0 and left.applies(device)
            if goes_on and not (outer is not None and outer.applies(device)):
                if outer is None:
                    _here.levels[depth] = left
                else:
                    outer.ambients += left.ambients
                    outer.bases = {**left.bases, **outer.bases}
                break


def _state(device: str) -> State:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _switch(device: str, state: State) -> None:
    enabled, dtype = state
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)


@functools.cache
def _end_in_forks() -> None:
    """Ends casts in forked processes: a data loader's results must not depend on its start."""
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=_end_all)


def _end_all() -> None:
    for level in _here.levels.values():
        for ambient in level.ambients:
            ambient.alive = False
    end_stale_casts()
