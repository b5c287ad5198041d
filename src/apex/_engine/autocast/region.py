"""Cast regions: functions that run with op casts on, or off."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from apex._core import tree
from apex._core.op_table import AutocastSpec
from apex._engine.autocast import kernels
from apex._engine.autocast.ambient import Ambient, settle
from apex._torch.dispatcher import AUTOCAST_KEYS, weight_cache_is_safe
from apex._torch.dynamo import at_tracing, inlined, untraced

P = ParamSpec("P")
R = TypeVar("R")

_DEVICE_TYPES = tuple(AUTOCAST_KEYS)
_OFF = torch.float32
"""The CPU's autocast dtype in :func:`casts_off`, which no region uses.

By it, regions inside stay off: also those that torch.utils.checkpoint recomputes, that run in
autograd's threads, or that dynamo traces, for all of which torch carries the dtype along.
"""

_is_compiling = torch.compiler.is_compiling


def is_off() -> bool:
    """Returns whether this thread is in a :func:`casts_off` block."""
    return torch.get_autocast_dtype("cpu") is _OFF


def devices_on() -> list[str]:
    """Returns the device types whose autocast is on in this thread."""
    return [device for device in _DEVICE_TYPES if torch.is_autocast_enabled(device)]


def under(
    devices: Sequence[str], dtype: torch.dtype | None, fn: Callable[P, R], /, *args: P.args,
    **kwargs: P.kwargs,
) -> R:  # fmt: skip
    """Calls ``fn`` under autocast to ``dtype``; ``None`` turns it off. Dynamo can trace it."""
    if not devices:
        return fn(*args, **kwargs)
    with torch.autocast(
        devices[0], dtype, enabled=dtype is not None, cache_enabled=weight_cache_is_safe
    ):
        return under(devices[1:], dtype, fn, *args, **kwargs)


class AutocastRegion:
    """Runs functions with op casts on; while it lives, its rows apply to autocast of its dtype.

    Pickling or copying makes an independent region with the same spec.

    Raises:
        ValueError: If a device type of the spec has no autocast.
    """

    def __init__(self, spec: AutocastSpec) -> None:
        self.spec = spec
        self._digest = kernels.digest(spec)
        self._ambients: list[Ambient] = []
        weakref.finalize(self, _end, kernels.begin(spec), self._ambients).atexit = False

    def __reduce__(self) -> tuple[type[AutocastRegion], tuple[AutocastSpec]]:
        return AutocastRegion, (self.spec,)

    @inlined
    def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns ``fn(*args, **kwargs)`` with casts on, in any thread, except in ``casts_off``.

        float64 arguments become fp32. A weight used by several operators is cast once in the
        outermost run.
        """
        if _is_compiling():
            if not self._digest:  # a guard: code with other rows is compiled again
                return fn(*args, **kwargs)
        else:
            settle()
        if is_off():
            return fn(*args, **kwargs)
        args, kwargs = tree.map_arguments(_without_double, args, kwargs)  # type: ignore[assignment]
        return under(self.spec.device_types, self.spec.dtype, fn, *args, **kwargs)

    def enter_ambient(self) -> None:
        """Turns casts on in this thread until ``leave_ambient``; of several, the newest apply."""
        self._ambients.append(Ambient(self.spec))

    def leave_ambient(self) -> None:
        """Ends this region's ambient casts; see Note [Ambient casts]. Idempotent."""
        while self._ambients:
            self._ambients.pop().end()


def _end(number: int, ambients: list[Ambient]) -> None:
    kernels.end(number)
    while ambients:
        ambients.pop().end()


def _without_double(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype is torch.float64 else tensor


class NoAutocastRegion:
    """Runs functions with the casts of every region off; a user's own autocast stays."""

    @inlined
    def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns ``fn(*args, **kwargs)`` with casts off; cast regions inside turn them back on."""
        return under(devices_cast(), None, fn, *args, **kwargs)


class AmbientRegion:
    """Runs functions under the casts of their thread, whichever session's they are."""

    @inlined
    def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns ``fn(*args, **kwargs)``."""
        return fn(*args, **kwargs)


class UncastBlock:
    """Turns casts off in this thread, without a trace of dynamo's. Its exit is idempotent."""

    _on: Sequence[str] = ()

    def __init__(self, devices: Callable[[], Sequence[str]] = devices_on) -> None:
        self._devices = devices

    @untraced
    def __enter__(self) -> None:
        self._on = self._devices()
        for device in self._on:
            torch.set_autocast_enabled(device, False)

    @untraced
    def __exit__(self, *error: object) -> None:
        on, self._on = self._on, ()
        for device in on:
            torch.set_autocast_enabled(device, True)


@contextmanager
def casts_off() -> Iterator[None]:
    """A context or decorator in which nothing is cast, in regions inside, too."""
    if not _is_compiling():
        settle()
    with _off(devices_on()):
        yield


@contextmanager
def _off(devices: Sequence[str]) -> Iterator[None]:
    if not devices:
        with torch.autocast("cpu", _OFF, enabled=False, cache_enabled=False):
            yield
        return
    with torch.autocast(devices[0], enabled=False, cache_enabled=False), _off(devices[1:]):
        yield


def devices_cast() -> list[str]:
    """Returns the device types whose autocast is on, to the dtype of a live session."""
    return [device for device in devices_on() if _is_ours(device)]


@at_tracing
def _is_ours(device: str) -> bool:
    return kernels.newest(device, torch.get_autocast_dtype(device)) is not None


def active_dtype() -> torch.dtype | None:
    """Returns the dtype that this thread casts to now, which can be traced; None without casts."""
    if not _is_compiling():
        settle()
    on = devices_cast()
    return torch.get_autocast_dtype(on[0]) if on else None
