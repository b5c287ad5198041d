"""Cast regions: functions that run with op casts on, or off.

Note [Accurate operators]
    A 16-bit model (O2, O3, O5) has no op casts, but a few operators have 16-bit kernels that lose
    accuracy or return garbage. A function mode finds the functions of
    :data:`apex._core.op_rows.INACCURATE` in the model's first forward passes and runs them in fp32.
    Later forward passes enter the mode only if it has found one, because a mode costs each call of
    torch some microseconds.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from apex._core import op_rows, tree
from apex._core.dtypes import is_low_precision
from apex._core.op_casts import tensors_in
from apex._core.op_table import AutocastSpec
from apex._core.tree import Args, Kwargs
from apex._engine.autocast import kernels
from apex._engine.autocast.ambient import (
    OFF,
    begin_casts,
    begin_run,
    devices_of_sessions,
    devices_on,
    end_casts,
    end_stale_casts,
    is_in_run,
)
from apex._engine.autocast.weights import shared
from apex._torch.autograd import backward_id
from apex._torch.dispatcher import weight_cache_is_safe
from apex._torch.dynamo import at_tracing, traces_function_modes, untraced

R = TypeVar("R")

_ACCURATE_FORWARDS = 32
"""Number of forward passes of a 16-bit model that are searched for inaccurate operators."""

Switch = tuple[Sequence[str], torch.dtype | None]
"""Device types, and the dtype that autocast casts to there; ``None`` turns autocast off."""

_log = logging.getLogger("apex")

_is_compiling = torch.compiler.is_compiling


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
    with torch.autocast(first, dtype, enabled, weight_cache_is_safe):
        return under(others, dtype, fn, args, kwargs)


class Region:
    """Runs functions with the casts of sessions off; a user's own autocast stays.

    Subclasses turn casts on, or also run accurate operators. Picklable and deep-copyable.

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

    @untraced  # dynamo compiles ExitStack's methods wrongly, after a graph break
    def enter(self, until: ExitStack, args: Args, kwargs: Kwargs) -> None:
        """Enters the region for an eager call with these arguments, until ``until`` closes."""
        end_stale_casts()
        devices, dtype = self.switch(args, kwargs)
        if not devices:
            return
        enabled = dtype is not None
        for device in devices:
            until.enter_context(torch.autocast(device, dtype, enabled, weight_cache_is_safe))
        begin_run(until)

    def share_casts(self, until: ExitStack, model: nn.Module) -> None:
        """Shares casts of weights in a forward pass that begins, until ``until`` closes."""

    def await_backward(self, output: Any) -> None:
        """Keeps shared casts until the backward pass of an output of the region."""

    def switch(self, args: Args, kwargs: Kwargs) -> Switch:
        """Returns how the region sets autocast for a call with these arguments."""
        if _is_compiling():
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

    While the region is alive, its rows apply under autocast to its dtype. A weight used by several
    operators is cast once; see Note [Shared casts].

    Raises:
        ValueError: If a device type of the spec has no autocast.
    """

    def __init__(self, spec: AutocastSpec) -> None:
        self.spec = spec
        # An attribute of its own, so that dynamo guards it.
        self._digest = spec.digest
        # The key of the spec among the live ones.
        self._token = kernels.activate_spec(spec)
        self.end = weakref.finalize(self, end_casts, self._token)
        """Ends the region: its rows no longer apply. Idempotent."""
        self.end.atexit = False  # the table dies with the process

    def switch(self, args: Args, kwargs: Kwargs) -> Switch:
        # Reading the digest makes dynamo guard it: code with other rows is compiled again.
        if not self._digest or torch.get_autocast_dtype("cpu") is OFF:
            return (), None
        for value in (*args, *kwargs.values()):
            # Most arguments are tensors, for which a walk would take 3 us more.
            tensors = [value] if isinstance(value, Tensor) else tree.tensors(value)
            for tensor in tensors:
                if tensor.dtype is torch.float64:
                    self.cast_all()
        return self.spec.device_types, self.spec.dtype

    def share_casts(self, until: ExitStack, model: nn.Module) -> None:
        end_stale_casts()
        if not is_in_run():
            shared.begin_forward(model, torch.device(self.spec.device_types[0]), self.spec.dtype)
            torch.autocast_increment_nesting()  # the end of an outermost block clears the cache
            until.callback(shared.end_forward)
            until.callback(torch.autocast_decrement_nesting)

    def await_backward(self, output: Any) -> None:
        shared.await_backward(output)

    @at_tracing
    def cast_all(self) -> None:
        """Casts by our kernels also where torch's own cast alike, which costs a call some 5 us.

        Ours accept float64 data beside fp32 weights, and share casts outside of forward passes.
        """
        for device in self.spec.device_types:
            kernels.register(device, self.spec.table.rows)

    def begin_ambient(self) -> None:
        """Turns casts on in this thread until the region ends; see Note [Ambient casts]."""
        begin_casts(self._token)


class LowPrecisionRegion(Region):
    """Runs 16-bit models without casts of sessions; see also Note [Accurate operators]."""

    def __init__(self) -> None:
        super().__init__()
        # Forward passes that are still to be searched.
        self._left = _ACCURATE_FORWARDS
        # The names of the inaccurate functions that were found.
        self._functions = set[str]()

    def run_traced(self, fn: Callable[..., R], args: Args, kwargs: Kwargs) -> R:
        # An export treats a mode as a side effect of the model.
        if not traces_function_modes or torch.compiler.is_exporting():
            return super().run_traced(fn, args, kwargs)
        with _AccurateMode(self._functions):
            return super().run_traced(fn, args, kwargs)

    @untraced  # dynamo compiles ExitStack's methods wrongly, after a graph break
    def enter(self, until: ExitStack, args: Args, kwargs: Kwargs) -> None:
        if self._left > 0 or self._functions:
            self._left -= 1
            until.enter_context(_AccurateMode(self._functions))
        super().enter(until, args, kwargs)


class _AccurateMode(TorchFunctionMode):
    """Runs inaccurate functions on fp32 copies, and rounds the result; records their names."""

    def __init__(self, noted: set[str]) -> None:
        super().__init__()
        self._noted = noted

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in op_rows.INACCURATE:
            return func(*args, **kwargs)
        low = [tensor for tensor in tensors_in(args, kwargs) if is_low_precision(tensor)]
        inaccurate_on = op_rows.INACCURATE[name]
        if not low or low[0].device.type not in inaccurate_on:
            return func(*args, **kwargs)
        if name not in self._noted and not _is_compiling():
            self._noted.add(name)
            _log.warning(
                "amp: %s runs in fp32 in this 16-bit model: its 16-bit kernel is not accurate.",
                name,
            )
        args, kwargs = tree.cast_arguments(args, kwargs, torch.float32)
        result = func(*args, **kwargs)
        return tree.cast_tensors(result, low[0].dtype)


@contextmanager
def casts_off() -> Iterator[None]:
    """A context or decorator in which nothing is cast, also in regions inside it."""
    if not _is_compiling():
        end_stale_casts()
    with _off(devices_on()):
        yield


@contextmanager
def _off(devices: Sequence[str]) -> Iterator[None]:
    """Turns autocast off on the devices, one at a time as :func:`under`, and marks the thread."""
    if devices:
        first, *others = devices
        with torch.autocast(first, enabled=False, cache_enabled=False), _off(others):
            yield
    else:
        with torch.autocast("cpu", OFF, enabled=False, cache_enabled=False):
            yield


def devices_cast() -> list[str]:
    """Returns the device types whose autocast is on with the dtype of a live session."""
    return [device for device in devices_on() if _is_ours(device)]


@at_tracing
def _is_ours(device: str) -> bool:
    dtype = torch.get_autocast_dtype(device)
    return kernels.newest(device, dtype) is not None


def active_dtype() -> torch.dtype | None:
    """Returns the dtype that this thread casts to now; None without casts. Dynamo can trace it."""
    if not _is_compiling():
        end_stale_casts()
    devices = devices_cast()
    return torch.get_autocast_dtype(devices[0]) if devices else None
