"""The autocast switches of a thread: casts of sessions that began in it, and steps without them.

Note [Ambient casts]
    A session turns autocast on in the thread that called ``initialize``. Outside of
    ``torch.autocast`` blocks, the switch is that of the newest live session that began in the
    thread; without one, it is as before the first of them. Inside a block, the block decides: a
    session that begins there casts in its models' forward passes only.

    A session may end inside a block, or in another thread, which cannot set the switch. So the next
    forward or amp call of the thread does, outside of blocks.

Note [Steps that raise]
    Casts of sessions are off in steps of optimizers that amp has not prepared, too. torch calls no
    hook after a step that raised an exception. Casts then stay off until the next forward or amp
    call of the thread.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import Optimizer

from apex._core.op_table import AutocastSpec
from apex._engine.autocast import kernels
from apex._torch.autograd import autocast_depth, backward_id
from apex._torch.dispatcher import AUTOCAST_KEYS
from apex._torch.dynamo import is_compiling_here, untraced, untraced_frame

OFF = torch.float32
"""The CPU's autocast dtype in ``casts_off`` blocks, and nowhere else.

By it, regions inside stay off: also those that torch.utils.checkpoint recomputes, that run in
autograd's threads, or that dynamo traces, for all of which torch carries the dtype along.
"""

State = tuple[bool, torch.dtype]
"""Whether autocast is on for a device type, and its dtype."""


def devices_on() -> list[str]:
    """Returns the device types whose autocast is on in this thread."""
    return [*filter(torch.is_autocast_enabled, AUTOCAST_KEYS)]


class UncastBlock:
    """Turns casts off in this thread, without a trace of dynamo's."""

    devices = staticmethod(devices_on)
    """Returns the device types whose casts are turned off."""

    @untraced
    def __enter__(self) -> None:
        self._on = self.devices()
        for device in self._on:
            torch.set_autocast_enabled(device, False)

    @untraced
    def __exit__(self, *error: object) -> None:
        for device in self._on:
            torch.set_autocast_enabled(device, True)
        torch.clear_autocast_cache()  # a step has changed weights, perhaps inside a forward

    def with_casts(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Returns ``closure`` with the casts from around the block."""

        @untraced_frame
        def evaluate() -> Any:
            self.__exit__()
            try:
                return closure()
            finally:
                self.__enter__()

        return evaluate


class _Thread(threading.local):
    depth = 0
    """The depth of blocks at which the casts that are on are a session's.

    Deeper, they are of a block of the script.
    """

    cache = True
    """Whether autocast cached weights before the first session."""

    def __init__(self) -> None:
        self.sessions: dict[object, AutocastSpec] = {}  # by the token of their spec, oldest first
        self.before: dict[str, State] = {}  # by device type, before the first session
        self.steps: list[_UncastStep] = []  # outermost first

    def switches(self) -> dict[str, State]:
        """Returns the state of each device type: by the newest session, or as before the first."""
        switches = dict(self.before)
        for spec in [*self.sessions.values()]:  # a finalizer may end a session meanwhile
            switches.update(dict.fromkeys(spec.device_types, (True, spec.dtype)))
        return switches

    def set_switches(self) -> None:
        """Sets autocast's state by the sessions, outside of blocks."""
        for device, (enabled, dtype) in self.switches().items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        # No weight cache outside of regions, where changes of weights go unnoticed.
        torch.set_autocast_cache_enabled(self.cache and not self.sessions)


_here = _Thread()


def begin_casts(token: object, spec: AutocastSpec) -> None:
    """Turns casts by a live spec on in this thread, until it ends; see Note [Ambient casts]."""
    end_stale_casts()
    if autocast_depth() > 0:
        return
    if not _here.sessions:
        for device in AUTOCAST_KEYS:
            state = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
            _here.before[device] = state
        _here.cache = torch.is_autocast_cache_enabled()
    _here.sessions[token] = spec
    _here.set_switches()


def end_casts(token: object) -> None:
    """Ends a spec, and its casts as soon as their thread can; safe in finalizers and any thread."""
    kernels.deactivate_spec(token)
    end_stale_casts()


@untraced
def end_stale_casts() -> None:
    """Ends this thread's casts of sessions that have ended, and steps that raised."""
    while _here.steps:
        _here.steps[-1].__exit__()
    ended = _here.sessions.keys() - kernels.live.keys()
    if not ended:
        return
    kernels.tag_caches()
    # A block, a pass and dynamo restore the switch at their end.
    if autocast_depth() > 0 or backward_id() != -1 or is_compiling_here():
        return
    # An operator or a step has turned it off for a while. A script may have set dtypes.
    if any(on and not torch.is_autocast_enabled(d) for d, (on, _) in _here.switches().items()):
        return
    for token in ended:
        _here.sessions.pop(token, None)
    _here.set_switches()


def _end_in_fork() -> None:
    """Ends casts in a forked process: a data loader's results must not depend on its start."""
    if _here.sessions:
        _here.sessions.clear()
        _here.set_switches()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_end_in_fork)


def begin_run(until: ExitStack) -> None:
    """Notes that a region has opened its blocks, until ``until`` closes."""
    until.callback(setattr, _here, "depth", _here.depth)
    _here.depth = autocast_depth()


def devices_of_sessions() -> list[str]:
    """Returns the device types whose autocast is on as sessions set it, not a user's own block."""
    return devices_on() if autocast_depth() == _here.depth else []


# -- steps of optimizers that amp has not prepared -------------------------------------------------


class _UncastStep(UncastBlock):
    """A step, without its closure."""

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
    if optimizer not in [step.optimizer for step in _here.steps]:
        return  # an amp call inside the step has ended it
    while _here.steps[-1].optimizer is not optimizer:
        _here.steps[-1].__exit__()
    _here.steps[-1].__exit__()
