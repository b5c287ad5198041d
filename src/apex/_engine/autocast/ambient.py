"""The autocast state of a thread: casts of sessions that began in it, and steps without casts.

Note [Ambient casts]
    A session turns autocast on in the thread that called ``initialize``. Outside of
    ``torch.autocast`` blocks, the newest live session that began in the thread sets autocast's
    state. Without a session, the state is as before the first one. Inside a block, the block
    decides: a session that begins there casts in its models' forward passes only.

    A session may end inside a block, or in another thread, where the state cannot be set. The
    thread's next forward or amp call outside of blocks then sets it.

Note [Steps that raise]
    Casts of sessions are also off in steps of optimizers that amp has not prepared. torch calls no
    hook after a step that raised an exception. Casts then stay off until the thread's next forward
    or amp call.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from apex._core.arguments import closure_of, replaced
from apex._core.op_table import AutocastSpec
from apex._core.tree import Args, Call, Kwargs
from apex._engine.autocast.weights import Weights, shared
from apex._engine.registry import live_specs
from apex._torch.autograd import autocast_depth, backward_id
from apex._torch.dispatcher import AUTOCAST_KEYS, weight_cache_is_safe
from apex._torch.dynamo import (
    CONFIG,
    DYNAMO,
    is_called_in,
    is_compiling_here,
    untraced,
    untraced_frame,
)

OFF = torch.float32
"""The CPU's autocast dtype in ``casts_off`` blocks, and nowhere else.

A region that is entered inside such a block sees this mark and stays off. torch copies the dtype
into checkpoint recomputation, autograd's threads and dynamo traces, which a flag of ours would not
reach.
"""


def devices_on() -> list[str]:
    """Returns the device types whose autocast is on in this thread."""
    return [*filter(torch.is_autocast_enabled, AUTOCAST_KEYS)]


class Casts:
    """A block with casts to a dtype, or without casts, in this thread; dynamo does not trace it.

    A ``torch.autocast`` block would take 10 us longer, and end the sharing of casts.
    """

    def __init__(self, devices: Collection[str], dtype: torch.dtype | None = None) -> None:
        """Chooses the casts of some device types; a dtype of None turns them off."""
        self._devices = devices
        self._dtype = dtype

    def await_backward(self, output: Any) -> None:
        """Keeps casts that weights share until the backward pass of a forward's output."""

    @untraced
    def __enter__(self) -> Casts:
        self._caches = torch.is_autocast_cache_enabled()
        self._before: list[tuple[str, bool, torch.dtype]] = []
        for device in self._devices:
            dtype = torch.get_autocast_dtype(device)
            self._before.append((device, torch.is_autocast_enabled(device), dtype))
            torch.set_autocast_enabled(device, self._dtype is not None)
            torch.set_autocast_dtype(device, self._dtype or dtype)
        return self

    @untraced
    def __exit__(self, *error: object) -> None:
        for device, enabled, dtype in self._before:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self._caches)


class ForwardCasts(Casts):
    """The casts of a forward pass, at an autocast nesting level of its own."""

    def __init__(self, weights: Weights, devices: Sequence[str], dtype: torch.dtype) -> None:
        """Chooses the casts of a model, which may be on several types of devices."""
        super().__init__(devices, dtype)
        self._forward = weights, torch.device(devices[0]), dtype
        # Whether it shares casts of weights; see Note [Shared casts].
        self._shares = False

    @untraced
    def __enter__(self) -> Casts:
        super().__enter__()
        self._depth = _here.depth
        is_inside = self._depth > 0
        _, enabled, dtype = self._before[0]
        if self._caches and enabled and dtype is not self._dtype:
            torch.set_autocast_cache_enabled(False)  # it has casts to the dtype around
        elif not is_inside:
            torch.set_autocast_cache_enabled(weight_cache_is_safe)
        if torch.is_autocast_cache_enabled():
            self._shares = shared.begin_forward(*self._forward, is_inside)
        _here.depth = torch.autocast_increment_nesting()
        return self

    def await_backward(self, output: Any) -> None:
        if self._shares:
            shared.await_backward(output)

    @untraced
    def __exit__(self, *error: object) -> None:
        if self._depth == 0:
            shared.end_forward(self._forward[0])
        torch.autocast_decrement_nesting()
        _here.depth = self._depth
        super().__exit__()


class UncastBlock(Casts):
    """A step without casts, after which none are shared."""

    @untraced
    def __exit__(self, *error: object) -> None:
        super().__exit__()
        shared.drop()  # a step has changed weights, perhaps inside a forward

    def with_casts(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Returns ``closure`` wrapped to run with the casts from outside the step."""

        @untraced_frame
        def evaluate() -> Any:
            self.__exit__()
            try:
                return closure()
            finally:
                self.__enter__()

        return evaluate


class _Thread(threading.local):
    """The casts of sessions in one thread."""

    def __init__(self) -> None:
        # Sessions that began here hold it; a later thread may have the same number.
        self.token = object()
        # The specs by which the state is set, oldest first, and the state before the first.
        self.specs: list[AutocastSpec] = []
        self.before = Casts(AUTOCAST_KEYS)
        # Whether the key of compilers' caches names the rows that apply.
        self.is_tagged = True
        # The number of autocast blocks around the casts that are a session's. Deeper inside, casts
        # belong to a block of the script.
        self.depth = 0
        # The steps without casts that run now, outermost first.
        self.steps: list[_UncastStep] = []

    def set_state(self, specs: list[AutocastSpec]) -> None:
        """Sets autocast's state by the specs, the newest last, outside of blocks."""
        if not self.specs:
            self.before.__enter__()
        self.specs = specs
        self.before.__exit__()
        for spec in specs:
            Casts(spec.device_types, spec.dtype).__enter__()
            # No weight cache outside of regions, where changes of weights go unnoticed.
            torch.set_autocast_cache_enabled(False)


_here = _Thread()


def this_thread() -> object:
    """Returns what stands for this thread, and no other one before or after it."""
    return _here.token


def _specs_with_rows() -> list[AutocastSpec]:
    """Returns the op casts whose rows apply in this thread, oldest first.

    While dynamo traces, the state of a session that is collected stays, and its rows with it.
    """
    return [*_here.specs, *live_specs()]


def newest(device: str, dtype: torch.dtype) -> AutocastSpec | None:
    """Returns the newest spec of a device type and dtype whose rows apply in this thread."""
    for spec in reversed(_specs_with_rows()):
        if spec.dtype is dtype and device in spec.device_types:
            return spec
    return None


_TAG = "-apex-"


def tag_caches() -> None:
    """Adds the rows that apply to the key of compilers' caches, which outlive the process.

    Casts are built into code that was compiled under them, and the caches do not see our kernels.
    Without the tag, a process without apex would load such code. Each thread has its own key, so
    the rows of a session that ended in another thread stay in it until this thread's next amp call.
    So do those of one that is collected while torch sets its configuration.
    """
    from torch.compiler import config

    _here.is_tagged = not is_called_in(CONFIG)  # first, as a session may be collected meanwhile
    if not _here.is_tagged:
        return
    digests = {spec.digest for spec in _specs_with_rows()}
    tag, _, _ = config.cache_key_tag.partition(_TAG)  # what others have set
    for digest in sorted(digests):
        tag += _TAG + digest
    config.cache_key_tag = tag


def begin_casts() -> None:
    """Sets the thread's casts by its sessions, one of which has begun outside of blocks."""
    follow_sessions()
    _here.set_state(live_specs(begun_in=_here.token))


def end_casts() -> None:
    """Ends the casts of sessions that have none any more, as soon as their thread can end them.

    Safe in finalizers and in any thread.
    """
    shared.drop()
    follow_sessions()
    tag_caches()


@untraced
def follow_sessions() -> None:
    """Ends steps that raised; sets the thread's casts by its sessions. See Note [Ambient casts]."""
    while _here.steps:
        _here.steps[-1].__exit__()
    if not _here.is_tagged:
        tag_caches()
    specs = live_specs(begun_in=_here.token)
    if specs == _here.specs:
        return
    # A block, inference mode, a backward pass and dynamo restore autocast's state when they end.
    if autocast_depth() > 0 or torch.is_inference_mode_enabled() or backward_id() != -1:
        return
    if is_compiling_here() or is_called_in(DYNAMO):
        return
    devices = devices_on()
    for spec in _here.specs:
        if not {*spec.device_types} <= {*devices}:
            return  # a kernel or a step has turned casts off for a while
    _here.set_state(specs)
    tag_caches()


def _end_in_fork() -> None:
    """Ends casts in a forked process, because a spawned data loader would not have them either."""
    _here.token = object()
    if _here.specs:
        _here.set_state([])


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_end_in_fork)


def devices_of_sessions() -> list[str]:
    """Returns the device types with casts of a session; none inside a block of the script."""
    if not _here.specs or autocast_depth() != _here.depth:
        return []
    return devices_on()


# -- steps of optimizers that amp has not prepared -------------------------------------------------


class _UncastStep(UncastBlock):
    """A step without casts of sessions; its closure keeps them."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(devices_of_sessions())
        self.optimizer = optimizer

    def __enter__(self) -> Casts:
        super().__enter__()
        _here.steps.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        if self in _here.steps:  # an amp call inside the step may have ended it
            _here.steps.remove(self)
            super().__exit__()


def begin_step(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> Call | None:
    """Begins a step without casts; returns its arguments if one of them is a closure."""
    step = _UncastStep(optimizer)
    step.__enter__()
    closure = closure_of(args[1:], kwargs)  # without the optimizer itself
    if closure is None:
        return None
    return replaced(args, kwargs, closure, step.with_casts(closure))


def end_step(optimizer: Optimizer) -> None:
    """Ends the innermost step of ``optimizer``, and the steps inside it that raised."""
    if optimizer not in [step.optimizer for step in _here.steps]:
        return  # an amp call inside the step has ended it
    has_ended = False
    while not has_ended:
        step = _here.steps[-1]
        step.__exit__()
        has_ended = step.optimizer is optimizer
