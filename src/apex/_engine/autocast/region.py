"""Cast regions: where op casts are on, in which thread, by which spec."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from apex._core.op_table import CastSpec, OpTable
from apex._engine.autocast.kernel_registry import Registry
from apex._engine.autocast.thread_casts import (
    DEVICE_TYPES,
    AmbientRequest,
    Threads,
    autocast_depth,
    backward_id,
    get_dtype,
    is_on,
)
from apex._torch.dynamo import at_tracing, is_compiling_here, untraced

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


class _Rules:
    """What kernels ask about the thread that calls them.

    Note [Casts in a backward pass]
        autograd's formulas compute in the dtypes of the forward, and nothing tells them from Python
        code that runs in the same pass: a function's own backward, a hook, a recompute. But they
        never mix dtypes, and code that does would fail. So in a backward pass mixed dtypes are
        resolved by the operator's row, all else is left as it comes. Inside ``scale_loss`` casts
        are off in formulas altogether, and :mod:`apex._engine.autocast.mixed` resolves what Python
        code mixes. A plain ``loss.backward()`` meets the casts of its thread: from the first one
        on, torch's own kernels, which would cast, have ours before them.

    Threads that no region has entered are autograd's device threads and those that run compiled
    code, or have a ``torch.autocast`` of their own: the newest session's table holds there.
    """

    def spec(self, device: str) -> CastSpec | None:
        here = _threads.here
        if here.stale:
            here.settle()
            if not is_on(device):
                return None
        return here.specs.get(device) or _registry.newest(device)

    def in_formulas(self) -> bool:
        task = backward_id()
        if task == -1:
            return False
        here = _threads.here
        # torch.utils.checkpoint has entered torch.autocast where it recomputes.
        return task != here.task and autocast_depth() <= here.depth

    def casts_double(self) -> bool:
        return bool(_threads.here.runs) or autocast_depth() > 0

    def backward_begins(self) -> None:
        if not is_compiling_here():
            _prepare_plain_backward()


_rules = _Rules()
_registry = Registry(_rules)


@at_tracing
def _prepare_plain_backward() -> None:
    """Makes this thread's ambient casts ready for a backward pass outside of ``scale_loss``."""
    for spec in {id(spec): spec for spec in _threads.here.specs.values()}.values():
        _registry.replace_native_of(spec)


def _leave_parent() -> None:
    """Withdraws the ambient casts of a forked process's thread.

    It is a copy of the thread that called ``initialize``, and another one all the same: what a
    data loader's workers compute does not depend on how they are started.
    """
    here = _threads.here
    for request in here.requests:
        request.alive = False
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
        self._requests: list[AmbientRequest] = []
        self._casts_double = False
        self._lease = _registry.lease(spec)
        weakref.finalize(self, _end, self._lease, self._requests).atexit = False

    def __reduce__(self) -> tuple[type[CastRegion], tuple[CastSpec]]:
        return CastRegion, (self.spec,)

    def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns ``fn(*args, **kwargs)`` with casts on, in any thread, unless ``no_casts`` holds.

        A weight that several operators use is cast once inside the outermost run; no cast outlives
        it, for the weight may change then.
        """
        if _is_compiling():
            if get_dtype("cpu") is _TRACED_OFF:
                return fn(*args, **kwargs)
            self._watch_doubles(args, kwargs)
            return _traced(self.spec.device_types, self.spec.dtype, fn, *args, **kwargs)
        here = _threads.here
        if here.stale:
            here.settle()
        if here.off and _stays_off():
            return fn(*args, **kwargs)
        if not self._casts_double:
            self._watch_doubles(args, kwargs)
        before = here.state(here.other_switches(self.spec))
        try:
            try:
                here.turn_on(self.spec, before)
                return fn(*args, **kwargs)
            finally:
                here.put_back(before)
        finally:  # see Note [Interrupted blocks]
            here.put_back(before)

    def enter_ambient(self) -> None:
        """Turns casts on in this thread until ``leave_ambient``.

        Of several ambient regions the newest living one rules; without any, what stood before.
        """
        lease = _registry.lease(self.spec, rules=False)
        request = AmbientRequest(self.spec, _threads.here, lease, _registry.end)
        self._requests.append(request)
        _threads.here.request(request)

    def leave_ambient(self) -> None:
        """Withdraws this region's ambient casts; may be called again, and from any thread.

        The thread that entered acts on it now if it is this one, else before its next operator
        with a row.
        """
        _withdraw(self._requests)

    @at_tracing
    def handle_doubles(self) -> None:
        """Makes low-precision operators cast float64 tensors too, inside runs.

        torch's own rows leave float64 alone, and then fail on mixed float64 and low precision.
        ``run`` calls this at the first float64 argument that it sees: always on, it would put
        Python into every matmul.
        """
        if not self._casts_double:
            self._casts_double = True
            _registry.replace_native_of(self.spec)

    def _watch_doubles(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        for value in args:
            if isinstance(value, Tensor) and value.dtype is torch.float64:
                self.handle_doubles()
        for value in kwargs.values() if kwargs else ():
            if isinstance(value, Tensor) and value.dtype is torch.float64:
                self.handle_doubles()


def _stays_off() -> bool:
    """Returns whether a run inside ``no_casts`` has no casts.

    In a backward pass that began inside ``no_casts`` it has, unless torch.utils.checkpoint
    recomputes under ambient casts: that has set the switch as it was in the forward.
    """
    here = _threads.here
    return backward_id() == here.task or bool(here.requests and autocast_depth() > here.depth)


class UncastRegion:
    """Runs functions with the casts of every region off; free of cost where none is on.

    Args:
        users: Whether also those of a ``torch.autocast`` of the user's own.
    """

    def __init__(self, *, users: bool = False) -> None:
        self._users = users

    def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns ``fn(*args, **kwargs)`` with casts off; a cast region run inside casts again."""
        if _is_compiling():
            return _traced([d for d in DEVICE_TYPES if is_on(d)], None, fn, *args, **kwargs)
        here = _threads.here
        if not here.specs and not self._users:
            return fn(*args, **kwargs)
        before = here.state(here.switches(DEVICE_TYPES if self._users else here.specs))
        try:
            try:
                here.turn_off(before, for_runs=False)
                return fn(*args, **kwargs)
            finally:
                here.put_back(before)
        finally:
            here.put_back(before)


class no_casts(ExitStack):  # noqa: N801 - reads as a function, like torch.no_grad
    """Turns the casts of every region off in this thread, also for regions that run inside.

    May be nested, left and entered again; cheaper than ``torch.autocast(enabled=False)``.
    """

    @untraced
    def __enter__(self) -> Any:
        here = _threads.here
        if here.stale:
            here.settle()
        before = here.state(here.switches(here.specs))
        self.callback(here.put_back, before)
        self.callback(here.put_back, before)  # see Note [Interrupted blocks]
        try:
            here.turn_off(before, for_runs=True)
            return self
        except BaseException:
            self.close()
            raise


def casts_off() -> AbstractContextManager[Any]:
    """Returns ``no_casts()`` for code that gradients flow through; traced, a form that traces."""
    if torch.is_grad_enabled():
        _prepare_plain_backward()
    if _is_compiling():
        return _traced_off([device for device in DEVICE_TYPES if is_on(device)])
    return no_casts()


def active_spec() -> CastSpec | None:
    """Returns the spec by which this thread casts now; None where casts are off.

    Where a thread casts by several specs (one a device type), the one that began first.
    """
    if _rules.in_formulas():
        return None
    for device in _threads.here.specs or DEVICE_TYPES:
        if is_on(device):
            return _rules.spec(device)
    return None


def active_dtype() -> torch.dtype | None:
    """Returns the low precision that this thread casts to now; None where casts are off.

    Unlike :func:`active_spec` it traces under ``torch.compile``.
    """
    if _is_compiling():
        on = [device for device in DEVICE_TYPES if is_on(device)]
        return get_dtype(on[0]) if on else None
    spec = active_spec()
    return None if spec is None else spec.dtype


_TRACED_OFF = torch.float32
"""The autocast dtype of a CPU where ``disable_casts`` is traced.

It casts to that nowhere else, and dynamo carries it into the graph: a region that is traced inside
finds it. Whether casts are on does not tell, for a region turns them on.
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

    One ``with`` a device: the form of it that dynamo traces.
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


def _withdraw(requests: list[AmbientRequest]) -> None:
    while requests:
        request = requests.pop()
        request.alive = False
        thread = request.thread()
        if thread is None:
            continue
        thread.stale = True
        if thread is _threads.here:
            thread.settle()
            if thread.busy:
                continue  # the block that it is in acts on it when it ends
        if request.release.alive:  # see Note [Sessions that end elsewhere]
            _registry.replace_native(request.lease)


def _end(lease: int, requests: list[AmbientRequest]) -> None:
    _withdraw(requests)
    _registry.end(lease)
