"""Cast regions: functions that run with op casts on, or off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch

from apex._core import tree
from apex._core.op_table import AutocastSpec
from apex._core.tree import Args, Kwargs
from apex._engine.autocast import kernels
from apex._engine.autocast.ambient import (
    OFF,
    Casts,
    ForwardCasts,
    devices_of_sessions,
    devices_on,
    follow_sessions,
    newest,
)
from apex._engine.autocast.weights import Weights
from apex._torch.autograd import backward_id
from apex._torch.dynamo import at_tracing, is_compiling, untraced

R = TypeVar("R")

Switch = tuple[Sequence[str], torch.dtype | None]
"""Device types, and the dtype that autocast casts to there; ``None`` turns autocast off."""


def under(
    devices: Sequence[str],
    dtype: torch.dtype | None,
    fn: Callable[..., R],
    args: Args,
    kwargs: Kwargs,
) -> R:
    """Calls ``fn`` under autocast to ``dtype``; ``None`` turns autocast off.

    One device type at a time, because dynamo compiles ExitStack's methods wrongly after a graph
    break.
    """
    if not devices:
        return fn(*args, **kwargs)
    first, *others = devices
    enabled = dtype is not None
    with torch.autocast(first, dtype, enabled, cache_enabled=False):
        return under(others, dtype, fn, args, kwargs)


class Region:
    """Runs functions with the casts of sessions off; a user's own autocast stays.

    Subclasses turn casts on. Picklable and deep-copyable.

    Note [Casts in a recompute]
        torch.utils.checkpoint opens its own blocks around a recompute, in which the casts of a
        session look like a user's. A recompute therefore turns off the casts that the last forward
        pass turned off. Threads with a session and threads without one differ in the weight cache
        setting, which torch restores in a recompute, so each setting has its own record.
    """

    def __init__(self) -> None:
        # Device types that the last forward pass turned off, by whether autocast caches weights.
        self._turned_off: dict[bool, Sequence[str]] = {}

    def run_traced(self, fn: Callable[..., R], args: Args, kwargs: Kwargs) -> R:
        """Calls ``fn(*args, **kwargs)`` inside the region, in code that dynamo traces."""
        devices, dtype = self.switch(args, kwargs)
        return under(devices, dtype, fn, args, kwargs)

    @untraced
    def casts(self, weights: Weights, args: Args, kwargs: Kwargs) -> AbstractContextManager[Casts]:
        """Returns the block for a model's eager forward pass, whose casts are told the output."""
        follow_sessions()
        devices, dtype = self.switch(args, kwargs)
        return Casts(devices) if dtype is None else ForwardCasts(weights, devices, dtype)

    def switch(self, args: Args, kwargs: Kwargs) -> Switch:
        """Returns how the region sets autocast for a call with these arguments."""
        if is_compiling():
            return devices_cast(), None
        is_cached = torch.is_autocast_cache_enabled()
        if backward_id() != -1:
            return self._turned_off.get(is_cached, ()), None
        devices = devices_of_sessions()
        self._turned_off[is_cached] = devices
        return devices, None


class AmbientRegion(Region):
    """Runs functions under the casts around them, such as a later session's."""

    def switch(self, args: Args, kwargs: Kwargs) -> Switch:
        return (), None


class AutocastRegion(Region):
    """Runs functions with op casts on, in any thread, except in ``casts_off``.

    While its session is alive, its rows apply under autocast to its dtype. A weight used by several
    operators is cast once; see Note [Shared casts].

    Raises:
        ValueError: If a device type of the spec has no autocast.
    """

    def __init__(self, spec: AutocastSpec) -> None:
        self.spec = spec
        # An attribute of its own, so that dynamo guards it.
        self._digest = spec.digest
        kernels.register_rows(spec)

    def switch(self, args: Args, kwargs: Kwargs) -> Switch:
        """Also has our kernels cast from now on, if an argument is fp64."""
        # Reading the digest makes dynamo guard it: code with other rows is compiled again.
        if not self._digest or torch.get_autocast_dtype("cpu") is OFF:
            return (), None
        for value in (*args, *kwargs.values()):
            for tensor in tree.tensors(value):
                if tensor.dtype is torch.float64:
                    self.cast_all()
        return self.spec.device_types, self.spec.dtype

    @at_tracing
    def cast_all(self) -> None:
        """Casts by our kernels also where torch's own cast alike, which costs a call some 5 us.

        Ours accept float64 data beside fp32 weights, and share casts outside of forward passes.
        """
        for device in self.spec.device_types:
            kernels.register(device, self.spec.table.rows)


@contextmanager
def casts_off() -> Iterator[None]:
    """A context or decorator in which nothing is cast, also in regions inside it."""
    if not is_compiling():
        follow_sessions()
    devices = devices_on()
    if devices:  # one at a time, as :func:`under`
        with torch.autocast(devices[0], enabled=False, cache_enabled=False), casts_off():
            yield
    else:
        with torch.autocast("cpu", OFF, enabled=False, cache_enabled=False):
            yield


def devices_cast() -> list[str]:
    """Returns the device types whose autocast is on, by any block, with a live session's dtype."""
    return [device for device in devices_on() if _is_ours(device)]


@at_tracing
def _is_ours(device: str) -> bool:
    dtype = torch.get_autocast_dtype(device)
    return newest(device, dtype) is not None


def active_dtype() -> torch.dtype | None:
    """Returns the dtype that this thread casts to now; None without casts. Dynamo can trace it."""
    if not is_compiling():
        follow_sessions()
    devices = devices_cast()
    return torch.get_autocast_dtype(devices[0]) if devices else None
