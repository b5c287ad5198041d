"""What casts in one thread: torch's autocast switches, and whose op table holds on which device."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from apex._core.op_table import CastSpec
from apex._torch.autograd import backward_id as backward_id
from apex._torch.dynamo import is_compiling_here, untraced

DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps")
"""Device types that have an autocast of their own."""

is_on, set_on = torch.is_autocast_enabled, torch.set_autocast_enabled
get_dtype, set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
_is_cache_on, _set_cache = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled


_call = operator.methodcaller("__call__")
_up_and_down = torch.autocast_increment_nesting, torch.autocast_decrement_nesting


def autocast_depth() -> int:
    """Returns how many ``torch.autocast`` blocks this thread is in."""
    # torch counts only while it changes the count. In one call of C code, for a Ctrl-C between the
    # two would leave it changed.
    depth: int = list(map(_call, _up_and_down))[1]
    return depth


class AmbientRequest:
    """A request for ambient casts in one thread; ``alive`` may be cleared from any thread.

    Attributes:
        spec: The casts.
        lease: Keeps the kernels until the thread has acted on the end of the request.
        release: Ends the lease; called when the thread is gone, at the latest.
        alive: Whether the casts are still asked for.
        applied: Whether the thread's switches follow it.
        depth: ``torch.autocast`` blocks around the request that have not ended.
    """

    __slots__ = ("alive", "applied", "depth", "lease", "release", "spec", "thread")

    def __init__(
        self, spec: CastSpec, thread: ThreadCasts, lease: int, end: Callable[[int], None]
    ) -> None:
        self.spec = spec
        self.thread = weakref.ref(thread)
        self.lease = lease
        self.release = weakref.finalize(thread, end, lease)
        self.release.atexit = False
        self.alive = True
        self.applied = False
        self.depth = autocast_depth()


Switch = tuple[str, bool, torch.dtype]
"""How casts stand on one device type: device type, whether on, autocast dtype."""

State = tuple[int, dict[str, CastSpec], int, int, int, bool, list[Switch]]
"""What a block puts back: ``busy``, ``specs``, ``runs``, ``off``, ``task``, whether the weight
cache is on, switches. A plain tuple, for every forward makes one."""


class _Before(NamedTuple):
    """How a device type's switch stood before the first ambient request, how deep in blocks."""

    on: bool
    dtype: torch.dtype
    depth: int


class ThreadCasts:
    """The casts of one thread.

    Note [Spec and switch]
        Two things are kept apart: ``specs`` says whose rows hold on a device type, torch's autocast
        switch says whether casts are on. ``no_casts`` turns only the switch off. When
        ``torch.utils.checkpoint`` recomputes a forward inside a backward (which runs under
        ``no_casts``), it sets the switch as it was in the forward, the rows are still there, and
        the recomputed dtypes are those of the forward.

    Note [Interrupted blocks]
        A Ctrl-C may hit any line. So a block takes the whole state before it changes anything,
        and puts all of it back in two nested ``finally``: ``put_back`` may be cut short and
        called again. ``busy`` is the first to change and the last to be put back.

    Attributes:
        specs: Spec by device type, of the ambient requests and of running regions; replaced,
            never changed.
        requests: Ambient requests, oldest first.
        busy: Blocks of any kind that will put the state back when they end.
        runs: Runs of cast regions inside each other.
        off: Whether ``no_casts`` holds (1) or not (0).
        task: Autograd's backward pass that the newest block began in (-1: none).
        stale: Whether ``settle`` may have something to do: requests changed, or were made inside
            ``torch.autocast`` blocks.
    """

    __slots__ = (
        *("busy", "off", "requests", "runs", "specs", "stale", "task"),
        *("__weakref__", "_before", "_cache_before", "_set"),
    )

    def __init__(self) -> None:
        self.specs: dict[str, CastSpec] = {}
        self.requests: list[AmbientRequest] = []
        self.busy = self.runs = self.off = 0
        self.task = -1
        self.stale = False
        self._before: dict[str, _Before] = {}
        self._set: dict[str, torch.dtype] = {}
        self._cache_before = True

    @property
    def depth(self) -> int:
        """``torch.autocast`` blocks that are around the ambient casts."""
        return self.requests[-1].depth if self.requests else 0

    # -- blocks --------------------------------------------------------------------------------

    def state(self, switches: list[Switch]) -> State:
        """Returns the state for ``put_back``, which will set no switches but these."""
        cache = _is_cache_on()
        return self.busy, self.specs, self.runs, self.off, self.task, cache, switches

    def switches(self, devices: Iterable[str]) -> list[Switch]:
        """Returns how the switch of each device type stands."""
        return [(device, is_on(device), get_dtype(device)) for device in devices]

    def other_switches(self, spec: CastSpec) -> list[Switch]:
        """Returns how those switches stand that a run of ``spec`` changes."""
        found: list[Switch] = []
        for device in spec.device_types:
            on, dtype = is_on(device), get_dtype(device)
            if not on or dtype is not spec.dtype or self.specs.get(device) is not spec:
                found.append((device, on, dtype))
        return found

    @untraced
    def put_back(self, before: State) -> None:
        """Ends a block, once; may be called again. See Note [Interrupted blocks]."""
        busy, specs, runs, off, task, cache, switches = before
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
        self.off, self.task, self.runs = off, task, runs
        self.busy = busy
        if self.stale:
            self.settle()

    def turn_on(self, spec: CastSpec, before: State) -> None:
        """Begins a run in the state ``before``: ``spec`` holds, with the switches on."""
        self.busy += 1
        self.runs += 1
        if self.runs == 1:
            _set_cache(True)
        self.off, self.task = 0, backward_id()
        for device, _, _ in before[-1]:
            self.specs = {**self.specs, device: spec}
            set_on(device, True)
            set_dtype(device, spec.dtype)

    def turn_off(self, before: State, *, for_runs: bool) -> None:
        """Begins a block in the state ``before`` with its switches off; also for runs in it."""
        self.busy += 1
        if for_runs:
            self.off, self.task = 1, backward_id()
        for device, _, _ in before[-1]:
            set_on(device, False)

    # -- ambient -------------------------------------------------------------------------------

    def request(self, ambient: AmbientRequest) -> None:
        """Makes an ambient request rule."""
        self.requests.append(ambient)
        self.stale = True
        self.settle()

    def settle(self) -> None:
        """Makes the newest living ambient request of each device type rule.

        Inside a block of ours it waits for the end of that block. With no request left, what stood
        before the first one comes back.

        Note [Sessions that end elsewhere]
            A session may end in another thread, or in a garbage collection at any point. A
            ``torch.autocast`` block and a call of compiled code put the switch back, at their end,
            to what they found: nothing can be turned off inside. Until the thread acts on it, at
            the next operator with a row, region or ``no_casts``, its kernels stay, and torch's own
            have ours before them.
        """
        if self.busy:
            return
        living = [request for request in self.requests if request.alive]
        ended = [request for request in self.requests if not request.alive]
        self.specs = {device: r.spec for r in living for device in r.spec.device_types}
        depth = autocast_depth()
        if ended and (is_compiling_here() or depth > min(request.depth for request in ended)):
            return
        # A block that was around a request has ended, and taken its switches along.
        if ended or any(not r.applied or r.depth > depth for r in living):
            self._set_switches(depth)
        for request in living:
            request.applied, request.depth = True, min(request.depth, depth)
        self.requests = living
        self.stale = any(request.depth for request in living)
        for request in ended:
            request.release()

    def _set_switches(self, depth: int) -> None:
        """Sets the switches by ``specs``; may be cut short and called again."""
        if self.specs and not self._before:
            self._cache_before = _is_cache_on()
        # Blocks that were around have ended, and have put back what stood before them: those of
        # this device type. Where the switch is as we set it, they were of another.
        before = {
            device: was._replace(depth=min(was.depth, depth))
            for device, was in self._before.items()
            if was.depth <= depth or (is_on(device) and get_dtype(device) is self._set.get(device))
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
        # Outside of runs nothing says when a weight has changed: no weight cache.
        _set_cache(not self.specs and self._cache_before)
        self._before = {device: before[device] for device in self.specs}
        self._set = {device: spec.dtype for device, spec in self.specs.items()}


class Threads(threading.local):
    """Holds every thread's casts; the one owner of per-thread state."""

    def __init__(self) -> None:
        self.here = ThreadCasts()
