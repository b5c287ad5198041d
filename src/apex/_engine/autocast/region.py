"""Cast regions: where op casts are on, in which thread, by which spec."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from apex._core.op_table import CastSpec, OpTable
from apex._engine.autocast.kernel_registry import Registry
from apex._engine.autocast.thread_casts import (
    DEVICE_TYPES,
    Ambient,
    Threads,
    autocast_depth,
    backward_id,
    get_dtype,
    is_on,
    set_on,
)
from apex._torch.dynamo import at_tracing, untraced

__all__ = [
    "CastRegion",
    "CastSpec",
    "OpTable",
    "UncastRegion",
    "active_dtype",
    "active_spec",
    "casts_off",
    "no_casts",
]

P = ParamSpec("P")
R = TypeVar("R")

_is_compiling = torch.compiler.is_compiling
_threads = Threads()


def _ruling(device: str) -> CastSpec | None:
    """Returns the spec whose rows hold in this thread on a device type.

    Note [Threads without a spec]
        Two kinds of work arrive in threads that no region has entered, and belong to one all the
        same: a recompute by ``torch.utils.checkpoint`` in autograd's device threads, and code from
        ``torch.compile``, where a region's ``run`` is traced rather than run. Both find autocast on
        with their region's dtype; they get the newest living region of that device type and dtype.
        A user's own ``torch.autocast`` keeps torch's rules when it is compiled: a traced ``run``
        turns on the autocast of one device type more, which nobody has, as a mark that dynamo
        carries into the graph. (The weight cache cannot be the mark: AOTAutograd turns it off.)
    """
    here = _threads.here
    spec = here.specs.get(device)
    if backward_id() == -1:
        return spec if spec is not None or not is_on(_TRACED_RUN) else _newest(device)
    if here.runs:
        return spec
    # Ambient casts alone do not reach into a plain ``loss.backward()``: autograd's formulas work in
    # the dtypes of the forward. A checkpoint that recomputes has entered torch.autocast.
    return (spec or _newest(device)) if autocast_depth() else None


def _newest(device: str) -> CastSpec | None:
    return _registry.newest(device, get_dtype(device))


# Device types whose autocast nobody has.
_TRACED_RUN = "ipu"
_TRACED_OFF = "maia"

_registry = Registry(_ruling)


def _leave_parent() -> None:
    """Withdraws the ambient casts of a forked process's thread.

    It is a copy of the thread that called ``initialize``, and another one all the same: what a
    data loader's workers compute does not depend on how they are started.
    """
    here = _threads.here
    for order in here.ambient:
        order.alive = False
    here.stale = True
    here.settle()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_leave_parent)


class CastRegion:
    """Runs functions with op casts on.

    While a region lives, the kernels that its devices lack are registered. A pickled or copied
    region is one of its own, with the same spec.

    Raises:
        ValueError: If a device type of the spec has no autocast.
    """

    def __init__(self, spec: CastSpec) -> None:
        self.spec = spec
        self._orders: list[Ambient] = []
        self._doubles = False
        self._lease = _registry.lease(spec)
        weakref.finalize(self, _end, self._lease, self._orders).atexit = False

    def __reduce__(self) -> tuple[type[CastRegion], tuple[CastSpec]]:
        return CastRegion, (self.spec,)

    def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns ``fn(*args, **kwargs)`` with casts on, in any thread, unless ``no_casts`` holds.

        A weight that several operators use is cast once inside the outermost run; no cast outlives
        it, for the weight may change then.
        """
        if _is_compiling():
            if is_on(_TRACED_OFF):
                return fn(*args, **kwargs)
            self._watch_doubles(args, kwargs)
            devices = (*self.spec.device_types, _TRACED_RUN)
            return _traced(devices, self.spec.dtype, fn, *args, **kwargs)
        here = _threads.here
        if here.stale:
            here.settle()
        # In a backward that began inside no_casts, a checkpoint has set casts as in its forward.
        if here.off and (here.ambient or backward_id() == here.off_task):
            return fn(*args, **kwargs)
        if not self._doubles:
            self._watch_doubles(args, kwargs)
        undo = here.turn_on(self.spec)
        outermost = not here.runs
        here.busy += 1
        here.runs += 1
        if outermost:
            cached = torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(True)
        try:
            return fn(*args, **kwargs)
        finally:
            if outermost:
                torch.clear_autocast_cache()
                torch.set_autocast_cache_enabled(cached)
            here.busy -= 1
            here.runs -= 1
            if undo:
                here.put_back(undo)
            if here.stale:
                here.settle()

    def enter_ambient(self) -> None:
        """Turns casts on in this thread until ``leave_ambient``.

        Of several ambient regions the newest living one rules; without any, what stood before.
        """
        here = _threads.here
        order = Ambient(self.spec, here)
        self._orders.append(order)
        here.ambient.append(order)
        here.stale = True
        here.settle()

    def leave_ambient(self) -> None:
        """Withdraws this region's ambient casts; may be called again, and from any thread.

        The thread that entered acts on it now if it is this one, else when it next enters a region.
        """
        _withdraw(self._orders)

    @at_tracing
    def handle_doubles(self) -> None:
        """Makes low-precision operators cast float64 tensors too, for the life of the region.

        torch's own rows leave float64 alone, and then fail on mixed float64 and low precision.
        ``run`` calls this at the first float64 argument that it sees: always on, it would put
        Python into every matmul.
        """
        if not self._doubles:
            self._doubles = True
            _registry.add_doubles(self._lease)

    def _watch_doubles(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        for value in args:
            if isinstance(value, Tensor) and value.dtype is torch.float64:
                self.handle_doubles()
        for value in kwargs.values() if kwargs else ():
            if isinstance(value, Tensor) and value.dtype is torch.float64:
                self.handle_doubles()


class UncastRegion:
    """Runs functions with the casts of every region off; free of cost where none is on."""

    def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns ``fn(*args, **kwargs)`` with casts off; a cast region run inside casts again."""
        if _is_compiling():
            return _traced([d for d in DEVICE_TYPES if is_on(d)], None, fn, *args, **kwargs)
        if not _threads.here.specs:
            return fn(*args, **kwargs)
        with _SwitchedOff():
            return fn(*args, **kwargs)


class _SwitchedOff(AbstractContextManager[None]):
    """Turns the casts of every region off in this thread, until the block ends."""

    __slots__ = ("_devices", "_here")

    def __enter__(self) -> None:
        here = self._here = _threads.here
        if here.stale:
            here.settle()
        here.busy += 1
        self._devices = [device for device in here.specs if is_on(device)]
        for device in self._devices:
            set_on(device, False)

    def __exit__(self, *exc_info: object) -> None:
        here = self._here
        for device in self._devices:
            set_on(device, True)
        here.busy -= 1
        if here.stale:
            here.settle()


class no_casts(_SwitchedOff):  # noqa: N801 - reads as a function, like torch.no_grad
    """Turns the casts of every region off in this thread, also for regions that run inside.

    May be nested, and is exception-safe; cheaper than ``torch.autocast(enabled=False)``.
    """

    __slots__ = ()

    @untraced
    def __enter__(self) -> None:
        super().__enter__()
        here = self._here
        if not here.off:
            here.off_task = backward_id()
        here.off += 1

    @untraced
    def __exit__(self, *exc_info: object) -> None:
        self._here.off -= 1
        super().__exit__(*exc_info)


def casts_off() -> AbstractContextManager[None]:
    """Returns ``no_casts()``, in code that is compiled a form of it that traces."""
    if _is_compiling():
        return _traced_off([device for device in DEVICE_TYPES if is_on(device)])
    return no_casts()


def active_spec() -> CastSpec | None:
    """Returns the spec by which this thread casts now; None where casts are off.

    Where a thread casts by several specs (one a device type), the one that began first.
    """
    specs = _threads.here.specs
    for device in specs or (DEVICE_TYPES if backward_id() != -1 else ()):
        if is_on(device):
            return _ruling(device)
    return None


def active_dtype() -> torch.dtype | None:
    """Returns the low precision that this thread casts to now; None where casts are off.

    Unlike :func:`active_spec` it traces under ``torch.compile``.
    """
    if _is_compiling():
        # The weight cache is off in the casts of regions, and on in a user's own autocast.
        on = [device for device in DEVICE_TYPES if is_on(device)]
        return get_dtype(on[0]) if on and not torch.is_autocast_cache_enabled() else None
    spec = active_spec()
    return None if spec is None else spec.dtype


def _traced(
    devices: Sequence[str],
    dtype: torch.dtype | None,
    fn: Callable[P, R],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> R:
    """Calls ``fn`` under autocast to ``dtype`` (None: off).

    One ``with`` a device: the form of it that dynamo traces.
    """
    if not devices:
        return fn(*args, **kwargs)
    with torch.autocast(devices[0], dtype, enabled=dtype is not None, cache_enabled=False):
        return _traced(devices[1:], dtype, fn, *args, **kwargs)


@contextmanager
def _traced_off(devices: Sequence[str]) -> Iterator[None]:
    device = devices[0] if devices else _TRACED_OFF
    off = device != _TRACED_OFF
    with torch.autocast(device, torch.bfloat16, enabled=not off, cache_enabled=False):
        if not off:
            yield
            return
        with _traced_off(devices[1:]):
            yield


def _withdraw(orders: list[Ambient]) -> None:
    here = _threads.here
    while orders:
        order = orders.pop()
        order.alive = False
        order.thread.stale = True
    if here.stale:
        here.settle()


def _end(lease: int, orders: list[Ambient]) -> None:
    _withdraw(orders)
    _registry.end(lease)
