"""Cast regions: where op casts are on, in which thread, and by which spec.

Note [Ambient casts]
    A session turns autocast on in the thread that called ``initialize``. When the session ends
    there, the state from before it returns at once. A ``torch.autocast`` block around that point
    restores the switch at its end, and another thread cannot set it; so the next forward or amp
    call of the thread sets it again.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from apex._core import tree
from apex._core.op_table import CastSpec, OpTable
from apex._engine.autocast import kernels
from apex._engine.autocast.blocks import (
    DEVICE_TYPES,
    autocast_depth,
    get_dtype,
    is_off,
    is_on,
    off,
    set_dtype,
    set_on,
    under,
)
from apex._torch.autograd import backward_id
from apex._torch.dynamo import at_tracing, is_compiling_here, untraced, untraced_frame

__all__ = [
    "CastRegion",
    "CastSpec",
    "OpTable",
    "UncastRegion",
    "active_dtype",
    "active_spec",
    "casts_off",
    "settle",
]

P = ParamSpec("P")
R = TypeVar("R")

_is_compiling = torch.compiler.is_compiling


class _Request:
    """A request for ambient casts in one thread.

    Attributes:
        alive: Whether it stands; any thread may set it to False.
        applied: Whether the thread's switches follow it.
    """

    def __init__(self, spec: CastSpec) -> None:
        self.spec = spec
        self.thread = threading.get_ident()
        self.depth = autocast_depth()
        self.alive = True
        self.applied = False


class _Thread(threading.local):
    """The ambient casts of one thread.

    Attributes:
        requests: The requests, oldest first.
        before: The switch of each device type before the first of them, and the weight cache's.
    """

    def __init__(self) -> None:
        self.requests: list[_Request] = []
        self.before: dict[str, tuple[bool, torch.dtype]] = {}
        self.cache = True

    def apply(self) -> bool:
        """Turns on the newest live request of each device type; returns whether it could."""
        depth = autocast_depth()
        if self.requests and self.requests[0].depth > depth:
            # A block around a request has ended, and restored the switch of its own device.
            ours = {device: r.spec.dtype for r in self.requests for device in r.spec.device_types}
            restored = [d for d in self.before if not is_on(d) or get_dtype(d) is not ours.get(d)]
            for device in restored:
                del self.before[device]
        for request in self.requests:
            if request.depth > depth:
                request.depth, request.applied = depth, False
        living = [request for request in self.requests if request.alive]
        ended = [request for request in self.requests if not request.alive]
        inside = any(depth > request.depth or _is_in_operator(request) for request in ended)
        if inside or (ended and (backward_id() != -1 or is_compiling_here())):
            return False  # a block, an operator, a pass or dynamo restores the switch at its end
        dtypes = {device: r.spec.dtype for r in living for device in r.spec.device_types}
        if not self.before:
            self.cache = torch.is_autocast_cache_enabled()
        for device in dtypes:
            self.before.setdefault(device, (is_on(device), get_dtype(device)))
        for device, (on, dtype) in self.before.items():
            set_on(device, on or device in dtypes)
            set_dtype(device, dtypes.get(device, dtype))
        # No weight cache outside of regions, where changes of weights go unnoticed.
        torch.set_autocast_cache_enabled(self.cache and not dtypes)
        for request in self.requests:
            request.applied = request.alive
        return True

    def settle(self) -> None:
        """Applies again what a block or another thread has ended, and drops it."""
        if any(not request.alive or request.depth for request in self.requests) and self.apply():
            self._drop_ended()

    def _drop_ended(self) -> None:
        self.requests = [request for request in self.requests if request.alive]
        kept = {device for request in self.requests for device in request.spec.device_types}
        self.before = {device: was for device, was in self.before.items() if device in kept}


_here = _Thread()


def _is_in_operator(request: _Request) -> bool:
    """Returns whether an operator has turned off the switch of ambient casts, for its inside."""
    return request.applied and not all(map(is_on, request.spec.device_types))


@untraced
def settle() -> None:
    """Ends this thread's casts of sessions that ended elsewhere; see Note [Ambient casts]."""
    if _here.requests:
        _here.settle()
        kernels.tag_caches()


@functools.cache
def _withdraw_in_forks() -> None:
    """Withdraws ambient casts in forked processes.

    Results of data loader workers must not depend on how they are started.
    """
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=lambda: _withdraw([*_here.requests]))


def _withdraw(requests: list[_Request]) -> None:
    while requests:
        request = requests.pop()
        request.alive = False
        if request.thread == threading.get_ident():
            _here.apply()


class CastRegion:
    """Runs functions with op casts on; while it lives, its rows apply to autocast of its dtype.

    Pickling or copying makes an independent region with the same spec.

    Raises:
        ValueError: If a device type of the spec has no autocast.
    """

    def __init__(self, spec: CastSpec) -> None:
        self.spec = spec
        self._digest = kernels.digest(spec)
        self._requests: list[_Request] = []
        weakref.finalize(self, _end, kernels.begin(spec), self._requests).atexit = False

    def __reduce__(self) -> tuple[type[CastRegion], tuple[CastSpec]]:
        return CastRegion, (self.spec,)

    def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns ``fn(*args, **kwargs)`` with casts on, in any thread, except in ``casts_off``.

        float64 arguments become fp32. A weight used by several operators is cast once in the
        outermost run.
        """
        if _is_compiling():
            if not self._digest:  # a guard: code with other rows is compiled again
                return fn(*args, **kwargs)
        elif _here.requests:
            _here.settle()
        if is_off():
            return fn(*args, **kwargs)
        if kwargs or not all(map(_is_cast, args)):
            args, kwargs = tree.map_arguments(_without_double, args, kwargs)  # type: ignore[assignment]
        return under(self.spec.device_types, self.spec.dtype, fn, *args, **kwargs)

    @untraced_frame
    def run_eagerly(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """As :meth:`run`, for a caller that knows that no compiler traces it."""
        return self.run(fn, *args, **kwargs)

    def enter_ambient(self) -> None:
        """Turns casts on in this thread until ``leave_ambient``; of several, the newest apply."""
        _withdraw_in_forks()
        _here.settle()
        request = _Request(self.spec)
        self._requests.append(request)
        _here.requests.append(request)
        _here.apply()

    def leave_ambient(self) -> None:
        """Withdraws this region's ambient casts; see Note [Ambient casts]. Idempotent."""
        _withdraw(self._requests)
        settle()


def _end(number: int, requests: list[_Request]) -> None:
    _withdraw(requests)
    kernels.end(number)


def _is_cast(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype is not torch.float64


def _without_double(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype is torch.float64 else tensor


class UncastRegion:
    """Runs functions with the casts of every region off; costs nothing if none is on.

    Args:
        users: Whether to turn off a user's own ``torch.autocast`` as well.
    """

    def __init__(self, *, users: bool = False) -> None:
        self._users = users

    def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns ``fn(*args, **kwargs)`` with casts off; cast regions inside turn them back on."""
        devices = [device for device in DEVICE_TYPES if is_on(device)]
        if devices and not self._users:
            devices = [device for device in devices if _is_ours(device)]
        return under(devices, None, fn, *args, **kwargs)

    @untraced_frame
    def run_eagerly(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """As :meth:`run`, for a caller that knows that no compiler traces it."""
        return self.run(fn, *args, **kwargs)


@contextmanager
def casts_off() -> Iterator[None]:
    """A context or decorator in which nothing is cast, in regions inside, too."""
    if not _is_compiling():
        settle()
    with off([device for device in DEVICE_TYPES if is_on(device)]):
        yield


@at_tracing
def _is_ours(device: str) -> bool:
    return kernels.newest(device, get_dtype(device)) is not None


def active_spec() -> CastSpec | None:
    """Returns the spec by which this thread casts now; None if casts are off."""
    settle()
    for device in DEVICE_TYPES:
        if is_on(device) and (spec := kernels.newest(device, get_dtype(device))) is not None:
            return spec
    return None


def active_dtype() -> torch.dtype | None:
    """Returns the dtype that this thread casts to now, which can be traced; None without casts."""
    if not _is_compiling():
        settle()
    on = [device for device in DEVICE_TYPES if is_on(device) and _is_ours(device)]
    return get_dtype(on[0]) if on else None
