"""Cast regions: functions that run with op casts on, or off.

Note [Accurate operators]
    A 16-bit model (O2, O3, O5) has no op casts, but a few operators have 16-bit kernels that lose
    accuracy, or return garbage. A function mode finds the functions of
    :data:`apex._core.op_rows.INACCURATE` in the model's first forward passes and runs them in fp32.
    If there was one, it does so in all later ones: a mode costs each call of torch some
    microseconds.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
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
)
from apex._torch.autograd import backward_id
from apex._torch.dispatcher import weight_cache_is_safe
from apex._torch.dynamo import at_tracing, inlined, traces_function_modes, untraced

P = ParamSpec("P")
R = TypeVar("R")

_ACCURATE_FORWARDS = 32
"""How many forward passes of a 16-bit model are searched for inaccurate operators."""

Switch = tuple[Sequence[str], torch.dtype | None]
"""Device types, and the dtype that autocast casts to on them; ``None`` turns it off."""

_log = logging.getLogger("apex")

_is_compiling = torch.compiler.is_compiling


def under(
    devices: Sequence[str],
    dtype: torch.dtype | None,
    fn: Callable[..., R],
    args: Args,
    kwargs: Kwargs,
) -> R:
    """Calls ``fn`` under autocast to ``dtype``; ``None`` turns it off. Dynamo can trace it."""
    if not devices:
        return fn(*args, **kwargs)
    with torch.autocast(
        devices[0], dtype, enabled=dtype is not None, cache_enabled=weight_cache_is_safe
    ):
        return under(devices[1:], dtype, fn, args, kwargs)


class Region:
    """Runs functions with the casts of sessions off; a user's own autocast stays.

    Subclasses turn casts on, or add to that. Picklable and deep-copyable.

    Note [Casts in a recompute]
        torch.utils.checkpoint opens blocks of its own around a recompute, in which the casts of a
        session look like a user's. So the same casts are off as in the last forward pass, by what
        torch brings back and differs between threads with a session and others: the weight cache.
    """

    def __init__(self) -> None:
        self._turned_off: dict[bool, Sequence[str]] = {}

    @inlined
    def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns ``fn(*args, **kwargs)``, called inside the region; dynamo can trace it."""
        if _is_compiling():
            return self.run_traced(fn, args, kwargs)
        with ExitStack() as until:
            self.enter(until, args, kwargs)
            return fn(*args, **kwargs)

    def run_traced(self, fn: Callable[..., R], args: Args, kwargs: Kwargs) -> R:
        """Does what :meth:`run` does, where dynamo traces it."""
        devices, dtype = self.switch(args, kwargs)
        return under(devices, dtype, fn, args, kwargs)

    @untraced  # dynamo compiles ExitStack's methods wrongly, after a graph break
    def enter(self, until: ExitStack, args: Args, kwargs: Kwargs) -> None:
        """Enters the region for a call with these arguments, until ``until`` closes."""
        end_stale_casts()
        devices, dtype = self.switch(args, kwargs)
        if not devices:
            return
        enabled = dtype is not None
        for device in devices:
            until.enter_context(torch.autocast(device, dtype, enabled, weight_cache_is_safe))
        begin_run(until)

    def switch(self, args: Args, kwargs: Kwargs) -> Switch:
        """Returns what the region switches for a call with these arguments."""
        if _is_compiling():
            return devices_cast(), None
        is_cached = torch.is_autocast_cache_enabled()
        if backward_id() != -1:
            return self._turned_off.get(is_cached, ()), None
        devices = devices_of_sessions()
        self._turned_off[is_cached] = devices
        return devices, None


class AmbientRegion(Region):
    """Runs functions under the casts that are on around them, as a later session's."""

    def switch(self, args: Args, kwargs: Kwargs) -> Switch:
        return (), None


class AutocastRegion(Region):
    """Runs functions with op casts on; while it lives, its rows apply to autocast of its dtype.

    They are on in any thread, except in ``casts_off``. A weight used by several operators is cast
    once in the outermost run.

    Pickling or copying makes an independent region with the same spec.

    Raises:
        ValueError: If a device type of the spec has no autocast.
    """

    def __init__(self, spec: AutocastSpec) -> None:
        self.spec = spec
        self._digest = spec.digest
        self._token = kernels.activate_spec(spec)
        self.end = weakref.finalize(self, end_casts, self._token)
        """Ends the region: its rows no longer apply. Idempotent."""
        self.end.atexit = False

    def __reduce__(self) -> tuple[type[AutocastRegion], tuple[AutocastSpec]]:
        return AutocastRegion, (self.spec,)

    def switch(self, args: Args, kwargs: Kwargs) -> Switch:
        # The digest is a guard: code with other rows is compiled again.
        if not self._digest or torch.get_autocast_dtype("cpu") is OFF:
            return (), None
        for value in (*args, *kwargs.values()):
            # Most arguments are tensors, for which a walk would take 3 us more.
            for tensor in [value] if isinstance(value, Tensor) else tree.tensors(value):
                if tensor.dtype is torch.float64:
                    self._accept_float64()
        return self.spec.device_types, self.spec.dtype

    @at_tracing
    def _accept_float64(self) -> None:
        """Lets float64 data meet fp32 weights in operators that torch itself casts, too.

        Their kernels of ours would cost each call some 5 us, so they wait for such data.
        """
        for device in self.spec.device_types:
            kernels.register(device, self.spec.table.rows)

    def begin_ambient(self) -> None:
        """Turns casts on in this thread until the region ends; see Note [Ambient casts]."""
        begin_casts(self._token, self.spec)


class LowPrecisionRegion(Region):
    """Runs 16-bit models: without casts of sessions, and with accurate operators.

    See Note [Accurate operators].
    """

    def __init__(self) -> None:
        super().__init__()
        self._left = _ACCURATE_FORWARDS
        self._functions: set[str] = set()

    def run_traced(self, fn: Callable[..., R], args: Args, kwargs: Kwargs) -> R:
        # An export takes a mode for a side effect of the model.
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
    """Runs inaccurate functions on fp32 copies, and rounds the result; notes their names."""

    def __init__(self, noted: set[str]) -> None:
        super().__init__()
        self._noted = noted

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in op_rows.INACCURATE:
            return func(*args, **kwargs)
        low = [tensor for tensor in tensors_in(args, kwargs) if is_low_precision(tensor)]
        if not low or low[0].device.type not in op_rows.INACCURATE[name]:
            return func(*args, **kwargs)
        if name not in self._noted and not _is_compiling():
            self._noted.add(name)
            _log.warning(
                "amp: %s runs in fp32 in this 16-bit model: its 16-bit kernel is not accurate.",
                name,
            )
        args, kwargs = tree.cast_arguments(args, kwargs, torch.float32)
        return tree.cast_tensors(func(*args, **kwargs), low[0].dtype)


@contextmanager
def casts_off() -> Iterator[None]:
    """A context or decorator in which nothing is cast, in regions inside, too."""
    if not _is_compiling():
        end_stale_casts()
    with _off(devices_on()):
        yield


@contextmanager
def _off(devices: Sequence[str]) -> Iterator[None]:
    if not devices:
        with torch.autocast("cpu", OFF, enabled=False, cache_enabled=False):
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
        end_stale_casts()
    on = devices_cast()
    return torch.get_autocast_dtype(on[0]) if on else None
