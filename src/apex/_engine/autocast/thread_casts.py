"""The casts of one thread: torch's autocast switches, and the op table of each device type."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from apex._core.op_table import CastSpec
from apex._torch.autograd import backward_id as backward_id
from apex._torch.dispatcher import weight_cache_is_safe
from apex._torch.dynamo import is_compiling_here, untraced

DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps")
"""Device types that torch has autocast for."""

is_on, set_on = torch.is_autocast_enabled, torch.set_autocast_enabled
get_dtype, set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
_is_cache_on, _set_cache = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled


_call = operator.methodcaller("__call__")
_nesting_calls = torch.autocast_increment_nesting, torch.autocast_decrement_nesting


def autocast_depth() -> int:
    """Returns how many ``torch.autocast`` blocks this thread is in."""
    # torch returns the count only when changing it. Both changes run in one C call, so that a
    # Ctrl-C cannot separate them.
    depth: int = list(map(_call, _nesting_calls))[1]
    return depth


class AmbientRequest:
    """A request for ambient casts in one thread; ``alive`` may be cleared from any thread.

    Attributes:
        spec: The casts.
        registration: Keeps the kernels until the thread has applied the request's end.
        unregister: Ends the registration; called at the latest when the thread is gone.
        alive: Whether the request still stands.
        applied: Whether the thread's switches follow it.
        depth: Number of open ``torch.autocast`` blocks around the request.
    """

    __slots__ = ("alive", "applied", "depth", "registration", "spec", "thread", "unregister")

    def __init__(
        self, spec: CastSpec, thread: ThreadCasts, registration: int, end: Callable[[int], None]
    ) -> None:
        self.spec = spec
        self.thread = weakref.ref(thread)
        self.registration = registration
        self.unregister = weakref.finalize(thread, end, registration)
        self.unregister.atexit = False
        self.alive = True
        self.applied = False
        self.depth = autocast_depth()


Switch = tuple[str, bool, torch.dtype]
"""The autocast state of one device type: device type, whether on, autocast dtype."""

State = tuple[int, dict[str, CastSpec], int, int, bool, int, bool, list[Switch]]
"""The state that a block restores: ``busy``, ``specs``, ``runs``, ``off``, ``mixes``, ``task``,
whether the weight cache is on, switches. A plain tuple, because every forward makes one."""

_saved = operator.attrgetter("busy", "specs", "runs", "off", "mixes", "task")


class _Before(NamedTuple):
    """A device type's switch before the first ambient request, and the autocast depth then."""

    on: bool
    dtype: torch.dtype
    depth: int


class ThreadCasts:
    """The casts of one thread.

    Note [Spec and switch]
        ``specs`` holds the rows that apply on each device type; torch's autocast switch determines
        whether casts are on. ``no_casts`` turns only the switch off. When
        ``torch.utils.checkpoint`` recomputes a forward inside a backward (which runs under
        ``no_casts``), it sets the switch as in the forward and the rows still apply, so the
        recomputed dtypes are those of the forward.

    Note [Interrupted blocks]
        A Ctrl-C may interrupt any line. So a block saves the whole state before it changes
        anything, and restores it in two nested ``finally`` clauses: if ``restore`` is interrupted,
        it runs again. ``busy`` changes first and is restored last.

    Attributes:
        specs: Spec by device type, from ambient requests and running regions; replaced, never
            mutated.
        requests: Ambient requests, oldest first.
        busy: Number of open blocks of any kind.
        runs: Number of nested runs of cast regions.
        off: 0 outside of blocks that keep runs off; otherwise 1 more than the number of
            ``torch.autocast`` blocks around the newest.
        mixes: Whether the newest such block belongs to a backward pass that began with casts on.
        pass_casts: The casts of Python code in backward passes; ``None`` for those of ``specs``.
        task: Id of autograd's backward pass in which the newest block began (-1: none).
        applied: The autocast dtype of each device type that was on when requests last set the
            switches; another dict each time.
        stale: Whether ``settle`` may have work: requests changed, or were made inside
            ``torch.autocast`` blocks.
    """

    __slots__ = (
        *("applied", "busy", "mixes", "off", "pass_casts", "requests", "runs", "specs", "stale"),
        *("task", "__weakref__", "_before", "_cache_before"),
    )

    def __init__(self) -> None:
        self.specs: dict[str, CastSpec] = {}
        self.requests: list[AmbientRequest] = []
        self.busy = self.runs = self.off = 0
        self.task = -1
        self.pass_casts: CastSpec | None = None
        self.mixes = self.stale = False
        self._before: dict[str, _Before] = {}
        self.applied: dict[str, torch.dtype] = {}
        self._cache_before = True

    # -- blocks --------------------------------------------------------------------------------

    def state_with(self, devices: Iterable[str]) -> State:
        """Returns the state for ``restore``, which sets the switches of these device types only."""
        before = _saved(self)  # before the switches; see turn_off
        switches = [(device, is_on(device), get_dtype(device)) for device in devices]
        return (*before, _is_cache_on(), switches)

    def state_before(self, spec: CastSpec) -> State:
        """Returns the state for ``restore``, with the switches that a run of ``spec`` changes."""
        before = _saved(self)  # before the switches; see turn_on
        switches: list[Switch] = []
        for device in spec.device_types:
            on, dtype = is_on(device), get_dtype(device)
            if not on or dtype is not spec.dtype or before[1].get(device) is not spec:
                switches.append((device, on, dtype))
        return (*before, _is_cache_on(), switches)

    @untraced
    def restore(self, before: State) -> None:
        """Ends a block; idempotent. See Note [Interrupted blocks]."""
        busy, specs, runs, off, mixes, task, cache, switches = before
        if self.busy == busy:
            return
        for device, on, dtype in switches:
            set_on(device, on)
            set_dtype(device, dtype)
        self.specs = specs
        if not runs:
            if self.runs:
                torch.clear_autocast_cache()
            _set_cache(cache)
        self.off, self.mixes, self.task, self.runs = off, mixes, task, runs
        self.busy = busy
        if self.stale:
            self.settle()

    def turn_on(self, spec: CastSpec, before: State) -> State:
        """Begins a run from the state ``before``, with ``spec`` applied and its switches on.

        Returns the state to restore: another one if a garbage collection has ended a session since
        ``before`` was read. None can from here on.
        """
        self.busy += 1
        if self.specs is not before[1]:
            before = before[0], *self.state_before(spec)[1:]
        self.runs += 1
        if self.runs == 1:
            _set_cache(weight_cache_is_safe)
        self.off, self.task = 0, backward_id()
        for device, _, _ in before[-1]:
            self.specs = {**self.specs, device: spec}
            set_on(device, True)
            set_dtype(device, spec.dtype)
        return before

    def turn_off(self, before: State, *, for_runs: bool) -> State:
        """Begins a block from the state ``before`` with its switches off, also for runs inside.

        Returns the state to restore; see :meth:`turn_on`.
        """
        self.busy += 1
        if self.specs is not before[1]:
            before = before[0], *self.state_with([each[0] for each in before[-1]])[1:]
        if for_runs:
            self.off, self.mixes, self.task = 1 + autocast_depth(), False, backward_id()
        for device, _, _ in before[-1]:
            set_on(device, False)
        return before

    # -- ambient -------------------------------------------------------------------------------

    def request(self, ambient: AmbientRequest) -> None:
        """Adds an ambient request and applies it."""
        self.requests.append(ambient)
        self.stale = True
        self.settle()

    def settle(self) -> None:
        """Applies the newest live ambient request of each device type.

        Inside a block of ours, the end of that block does it. With no request left, the state from
        before the first one returns.

        Note [Sessions that end elsewhere]
            A session may end in another thread, or in a garbage collection at any point. A
            ``torch.autocast`` block, a call of compiled code, a backward pass and an operator's
            kernel restore the switch at their end, so it cannot be turned off inside. Until the
            thread applies the end of the session, at its next operator with a row, region or
            ``no_casts``, the session's kernels stay registered, and ours replace torch's own.
        """
        if self.busy:
            return
        living = [request for request in self.requests if request.alive]
        ended = [request for request in self.requests if not request.alive]
        self.specs = {device: r.spec for r in living for device in r.spec.device_types}
        depth = autocast_depth()
        inside = backward_id() != -1 or is_compiling_here() or _in_operator(ended, depth)
        if ended and (inside or depth > min(request.depth for request in ended)):
            return
        # A block around a request has ended and reset its switches.
        if ended or any(not r.applied or r.depth > depth for r in living):
            self._set_switches(depth)
        for request in living:
            request.applied, request.depth = request.alive, min(request.depth, depth)
        self.requests = living
        self.stale = any(request.depth for request in living)
        for request in ended:
            request.applied = False
            request.unregister()
        if not all(request.alive for request in living):  # one ended in a garbage collection
            self.stale = True
            self.settle()

    def _set_switches(self, depth: int) -> None:
        """Sets the switches from ``specs``; safe to interrupt and repeat."""
        if self.specs and not self._before:
            self._cache_before = _is_cache_on()
        # Surrounding blocks that ended have already restored the switch of their device type. A
        # switch that is still as we set it was not theirs.
        before = {
            device: _Before(was.on, was.dtype, min(was.depth, depth))
            for device, was in self._before.items()
            if was.depth <= depth
            or (is_on(device) and get_dtype(device) is self.applied.get(device))
        }
        for device in self.specs:
            before.setdefault(device, _Before(is_on(device), get_dtype(device), depth))
        self._before = before
        for device, spec in self.specs.items():
            set_on(device, True)
            set_dtype(device, spec.dtype)
        for device in before.keys() - self.specs.keys():
            set_on(device, before[device].on)
            set_dtype(device, before[device].dtype)
        # No weight cache outside runs, where changes of weights go unnoticed.
        _set_cache(not self.specs and self._cache_before)
        self._before = {device: before[device] for device in self.specs}
        self.applied = {device: was.dtype for device, was in before.items() if was.on}
        self.applied |= {device: spec.dtype for device, spec in self.specs.items()}


def _in_operator(requests: Iterable[AmbientRequest], depth: int) -> bool:
    """Returns whether an operator runs that has turned off a switch of these, to turn it on again.

    Blocks do so, too, but neither those that have ended nor those around are asked about.
    """
    here = [r.spec for r in requests if r.applied and r.depth <= depth]
    return not all(is_on(device) for spec in here for device in spec.device_types)


class Threads(threading.local):
    """Every thread's casts; the one owner of per-thread state."""

    def __init__(self) -> None:
        self.current = ThreadCasts()


threads = Threads()
