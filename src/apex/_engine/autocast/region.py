"""Cast regions: where op casts are on, in which thread, and by which spec."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from apex._core.op_table import CastSpec, OpTable
from apex._engine.autocast.blocks import no_casts
from apex._engine.autocast.kernel_registry import Registry
from apex._engine.autocast.mixed import resolve_mixed
from apex._engine.autocast.thread_casts import (
    DEVICE_TYPES,
    AmbientRequest,
    autocast_depth,
    backward_id,
    get_dtype,
    is_on,
    threads,
)
from apex._torch.dynamo import at_tracing, untraced_frame

__all__ = [
    "CastRegion",
    "CastSpec",
    "OpTable",
    "UncastRegion",
    "active_dtype",
    "active_spec",
    "casts_off",
]

P = ParamSpec("P")
R = TypeVar("R")

_is_compiling = torch.compiler.is_compiling


class _Rules:
    """The op casts of the calling thread.

    In threads that no region has entered, the newest session's table applies: autograd's device
    threads, and threads that run compiled code or a ``torch.autocast`` of their own.
    """

    def spec(self, device: str) -> CastSpec | None:
        here = threads.current
        if here.stale:
            here.settle()
            if not is_on(device):
                return None
        return here.specs.get(device) or _registry.newest(device)

    def casts_double(self) -> bool:
        return bool(threads.current.runs) or autocast_depth() > 0

    @untraced_frame
    def run_backward(self, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        inside = resolve_mixed(_cast_by, _registry.newest)
        try:
            try:
                inside.__enter__()
                return run(*args, **kwargs)
            finally:
                inside.__exit__()
        finally:  # see Note [Interrupted blocks]
            if inside.modes is not None:
                inside.__exit__()


_rules = _Rules()
_registry = Registry(_rules)


def _withdraw_after_fork() -> None:
    """Withdraws the ambient casts in a forked process.

    Its thread is a copy of one that called ``initialize``, but the results of data loader workers
    must not depend on how they are started.
    """
    here = threads.current
    for request in here.requests:
        request.alive = False
    here.stale = True
    here.settle()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_withdraw_after_fork)


class _Casts:
    """Runs functions with the casts of a spec on, while its kernels are registered."""

    def __init__(self, spec: CastSpec) -> None:
        self.spec = spec
        self._casts_double = False

    def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns ``fn(*args, **kwargs)`` with casts on, in any thread, except in ``no_casts``.

        A weight used by several operators is cast once inside the outermost run; the cast is
        dropped at its end, as the weight may change after it.
        """
        if _is_compiling():
            if get_dtype("cpu") is _TRACED_OFF:
                return fn(*args, **kwargs)
            self._check_doubles(args, kwargs)
            return _traced(self.spec.device_types, self.spec.dtype, fn, *args, **kwargs)
        return self.run_eagerly(fn, *args, **kwargs)

    @untraced_frame
    def run_eagerly(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """As :meth:`run`, for a caller that knows that no compiler traces it."""
        here = threads.current
        if here.stale:
            here.settle()
        if here.off and _stays_off(self.spec):
            return fn(*args, **kwargs)
        if not self._casts_double:
            self._check_doubles(args, kwargs)
        before = here.state_before(self.spec)
        try:
            try:
                before = here.turn_on(self.spec, before)
                return fn(*args, **kwargs)
            finally:
                here.restore(before)
        finally:  # see Note [Interrupted blocks]
            if here.busy != before[0]:
                here.restore(before)

    @at_tracing
    def handle_doubles(self) -> None:
        """Makes low-precision operators cast float64 tensors too, inside runs.

        torch's own kernels leave float64 as it is, and then fail on mixed float64 and low
        precision. ``run`` calls this at the first float64 argument, because it makes every matmul
        call Python.
        """
        if not self._casts_double:
            self._casts_double = True
            _registry.replace_native_of(self.spec)

    def _check_doubles(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        for value in args:
            if isinstance(value, Tensor) and value.dtype is torch.float64:
                self.handle_doubles()
        for value in kwargs.values() if kwargs else ():
            if isinstance(value, Tensor) and value.dtype is torch.float64:
                self.handle_doubles()


class CastRegion(_Casts):
    """Runs functions with op casts on.

    While a region lives, the kernels that its devices lack are registered. Pickling or copying
    makes an independent region with the same spec.

    Raises:
        ValueError: If a device type of the spec has no autocast.
    """

    def __init__(self, spec: CastSpec) -> None:
        super().__init__(spec)
        self._requests: list[AmbientRequest] = []
        self._registration = _registry.register(spec)
        weakref.finalize(self, _end, self._registration, self._requests).atexit = False

    def __reduce__(self) -> tuple[type[CastRegion], tuple[CastSpec]]:
        return CastRegion, (self.spec,)

    def enter_ambient(self) -> None:
        """Turns casts on in this thread until ``leave_ambient``.

        Of several ambient regions the newest live one applies; after the last one, the previous
        state returns.
        """
        registration = _registry.register(self.spec, rules=False)
        request = AmbientRequest(self.spec, threads.current, registration, _registry.unregister)
        self._requests.append(request)
        threads.current.request(request)

    def leave_ambient(self) -> None:
        """Withdraws this region's ambient casts; idempotent, and safe in any thread.

        Takes effect at once in the calling thread, and in another before its next operator that has
        a row.
        """
        _withdraw(self._requests)


def _stays_off(spec: CastSpec) -> bool:
    """Returns whether casts stay off in a run of ``spec`` inside ``no_casts``.

    In a backward pass that began inside ``no_casts`` they are on, except when
    torch.utils.checkpoint recomputes what ran with ambient casts off: it sets the switch itself, as
    in the forward.
    """
    here = threads.current
    if backward_id() == here.task:
        return True
    recomputes = bool(here.requests) and autocast_depth() >= here.off
    return recomputes and not any(map(is_on, spec.device_types))


class UncastRegion:
    """Runs functions with the casts of every region off; costs nothing if none is on.

    Args:
        users: Whether to turn off a user's own ``torch.autocast`` as well.
    """

    def __init__(self, *, users: bool = False) -> None:
        self._users = users

    def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns ``fn(*args, **kwargs)`` with casts off; cast regions inside turn them back on."""
        if _is_compiling():
            return _traced([d for d in DEVICE_TYPES if is_on(d)], None, fn, *args, **kwargs)
        return self.run_eagerly(fn, *args, **kwargs)

    @untraced_frame
    def run_eagerly(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """As :meth:`run`, for a caller that knows that no compiler traces it."""
        here = threads.current
        if not here.specs and not self._users:
            return fn(*args, **kwargs)
        before = here.state_with(DEVICE_TYPES if self._users else here.specs)
        try:
            try:
                before = here.turn_off(before, for_runs=False)
                return fn(*args, **kwargs)
            finally:
                here.restore(before)
        finally:
            if here.busy != before[0]:
                here.restore(before)


def casts_off() -> AbstractContextManager[Any]:
    """Returns ``no_casts()`` for differentiable code; under dynamo, a form that it can trace."""
    if _is_compiling():
        return _traced_off([device for device in DEVICE_TYPES if is_on(device)])
    # In autograd's device threads torch.utils.checkpoint turns casts on to recompute.
    return _CastsOff([device for device in DEVICE_TYPES if is_on(device) and _rules.spec(device)])


class _CastsOff(no_casts):
    """A block without casts that is also a decorator, as contextlib's are."""

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Returns ``fn`` with casts off in each call, also those of later sessions."""

        @functools.wraps(fn)
        def uncast(*args: P.args, **kwargs: P.kwargs) -> R:
            with casts_off():
                return fn(*args, **kwargs)

        return uncast


def active_spec() -> CastSpec | None:
    """Returns the spec by which this thread casts now; None if casts are off.

    If the device types have different specs, returns that of the first one with casts on.
    """
    for device in threads.current.specs or DEVICE_TYPES:
        if is_on(device):
            return _rules.spec(device)
    return None


def active_dtype() -> torch.dtype | None:
    """Returns the low-precision dtype that this thread casts to now; None if casts are off.

    Unlike :func:`active_spec`, it can be traced by ``torch.compile``.
    """
    if _is_compiling():
        on = [device for device in DEVICE_TYPES if is_on(device)]
        return get_dtype(on[0]) if on else None
    spec = active_spec()
    return None if spec is None else spec.dtype


_TRACED_OFF = torch.float32
"""The CPU's autocast dtype while ``disable_casts`` is traced.

No region uses this dtype, and dynamo keeps it in the graph, so a region traced inside recognizes
it. Whether casts are on would not be enough, because an outer region may have turned them on.
"""


def _traced(
    devices: Sequence[str],
    dtype: torch.dtype | None,
    fn: Callable[P, R],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> R:
    """Calls ``fn`` under autocast to ``dtype`` (None: off).

    Nests one ``with`` per device, which dynamo can trace.
    """
    if not devices:
        return fn(*args, **kwargs)
    with torch.autocast(devices[0], dtype, enabled=dtype is not None, cache_enabled=False):
        return _traced(devices[1:], dtype, fn, *args, **kwargs)


@contextmanager
def _traced_off(devices: Sequence[str]) -> Iterator[None]:
    if not devices:
        with torch.autocast("cpu", _TRACED_OFF, enabled=False, cache_enabled=False):
            yield
        return
    with torch.autocast(devices[0], enabled=False, cache_enabled=False), _traced_off(devices[1:]):
        yield


def _cast_by(
    specs: Mapping[str, CastSpec], fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    if any(is_on(device) for device in specs) or _is_switched_off():
        return fn(*args, **kwargs)  # casts are those of torch's switch: of a recompute, for example
    if _is_compiling():
        for device, spec in specs.items():
            fn = functools.partial(_traced, [device], spec.dtype, fn)
        return fn(*args, **kwargs)
    for spec in {id(spec): spec for spec in specs.values()}.values():
        fn = functools.partial(_Casts(spec).run, fn)
    return fn(*args, **kwargs)


@at_tracing
def _is_switched_off() -> bool:
    """Returns whether code inside a backward pass has turned off the casts of mixed dtypes."""
    here = threads.current
    if get_dtype("cpu") is _TRACED_OFF:
        return True
    if here.off:
        return backward_id() == here.task or any(map(_stays_off, here.specs.values()))
    return here.runs > 0


def _withdraw(requests: list[AmbientRequest]) -> None:
    while requests:
        request = requests.pop()
        request.alive = False
        thread = request.thread()
        if thread is None:
            continue
        thread.stale = True
        if thread is threads.current:
            thread.settle()
            if thread.busy:
                continue  # the enclosing block settles it at its end
        if request.unregister.alive:  # see Note [Sessions that end elsewhere]
            _registry.replace_native(request.registration)


def _end(registration: int, requests: list[AmbientRequest]) -> None:
    _withdraw(requests)
    _registry.unregister(registration)
