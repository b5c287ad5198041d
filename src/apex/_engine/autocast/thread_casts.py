"""What casts in one thread: torch's autocast switch, and whose op table holds on which device."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import torch

from apex._core.op_table import CastSpec
from apex._torch.autograd import backward_id as backward_id
from apex._torch.dynamo import is_compiling_here

DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps")
"""Device types that have an autocast of their own."""

Switch = tuple[str, bool, torch.dtype, "CastSpec | None"]
"""How casts stood on one device type: device type, on, autocast dtype, ruling spec."""

is_on, set_on = torch.is_autocast_enabled, torch.set_autocast_enabled
get_dtype, set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype


def autocast_depth() -> int:
    """Returns how many ``torch.autocast`` blocks this thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


class Ambient:
    """A standing order to cast in one thread; ``alive`` may be cleared from any thread."""

    __slots__ = ("alive", "depth", "spec", "thread")

    def __init__(self, spec: CastSpec, thread: ThreadCasts) -> None:
        self.spec = spec
        self.thread = thread
        self.alive = True
        self.depth = autocast_depth()


class ThreadCasts:
    """The casts of one thread.

    Note [Spec and switch]
        Two things are kept apart: ``specs`` says whose rows hold on a device type, torch's autocast
        switch says whether casts are on. ``no_casts`` turns only the switch off. When
        ``torch.utils.checkpoint`` recomputes a forward inside a backward (which runs under
        ``no_casts``), it sets the switch as it was in the forward, the rows are still there, and
        the recomputed dtypes are those of the forward.

    Attributes:
        specs: Spec by device type, of the ambient regions and of running ones.
        ambient: Ambient orders, oldest first.
        runs: Runs of cast regions inside each other.
        off: ``no_casts`` inside each other.
        off_task: Autograd's backward in which the outermost ``no_casts`` began (-1: none).
        busy: Blocks of any kind that will put the switch back when they end.
        stale: Ambient orders changed and ``settle`` has not acted on it yet.
    """

    __slots__ = (
        *("ambient", "busy", "off", "off_task", "runs", "specs", "stale"),
        *("__weakref__", "_cache_before", "_retry", "_switch_before"),
    )

    def __init__(self) -> None:
        self.specs: dict[str, CastSpec] = {}
        self.ambient: list[Ambient] = []
        self.runs = 0
        self.off = 0
        self.off_task = -1
        self.busy = 0
        self.stale = False
        self._switch_before: dict[str, tuple[bool, torch.dtype]] = {}
        self._cache_before = True
        self._retry: Callable[[str, dict[str, int]], None] | None = None

    def settle(self) -> None:
        """Makes the newest living ambient order of each device type rule.

        Inside a block that will put the switch back it waits for the end of that block. With no
        order left, what stood before the first one comes back.

        Note [Sessions that end inside another's block]
            A session may end in a garbage collection, and so at any point. A ``torch.autocast``
            block and a call of compiled code put the switch back, at their end, to what they
            found: nothing can be withdrawn inside. It is when the thread next enters a region or
            a ``no_casts``, or collects garbage, after that.
        """
        if self.busy:
            return
        ended = [order for order in self.ambient if not order.alive]
        if ended and (is_compiling_here() or autocast_depth() > min(o.depth for o in ended)):
            self._settle_later()
        else:
            self._settle()

    def _settle_later(self) -> None:
        if self._retry is None:
            self._retry = _retry(weakref.ref(self), threading.get_ident())
            gc.callbacks.append(self._retry)

    def _settle(self) -> None:
        self.stale = False
        if self._retry is not None:
            gc.callbacks.remove(self._retry)
            self._retry = None
        self.ambient = [order for order in self.ambient if order.alive]
        specs = {device: order.spec for order in self.ambient for device in order.spec.device_types}
        if specs and not self._switch_before:
            self._cache_before = torch.is_autocast_cache_enabled()
        for device, spec in specs.items():
            self._switch_before.setdefault(device, (is_on(device), get_dtype(device)))
            set_on(device, True)
            set_dtype(device, spec.dtype)
        for device in self._switch_before.keys() - specs.keys():
            on, dtype = self._switch_before.pop(device)
            set_on(device, on)
            set_dtype(device, dtype)
        # Outside of runs nothing says when a weight has changed: no weight cache.
        torch.set_autocast_cache_enabled(not specs and self._cache_before)
        self.specs = specs

    def turn_on(self, spec: CastSpec) -> list[Switch] | None:
        """Makes ``spec`` rule with casts on; returns what to put back, None if it ruled already."""
        undo: list[Switch] | None = None
        for device in spec.device_types:
            on, dtype, before = is_on(device), get_dtype(device), self.specs.get(device)
            if on and before is spec and dtype is spec.dtype:
                continue
            undo = undo or []
            undo.append((device, on, dtype, before))
            self.specs[device] = spec
            set_on(device, True)
            set_dtype(device, spec.dtype)
        return undo

    def put_back(self, undo: list[Switch]) -> None:
        """Undoes one ``turn_on``."""
        for device, on, dtype, before in undo:
            set_on(device, on)
            set_dtype(device, dtype)
            if before is None:
                del self.specs[device]
            else:
                self.specs[device] = before


def _retry(
    reference: weakref.ref[ThreadCasts], thread: int
) -> Callable[[str, dict[str, int]], None]:
    def retry(phase: str, info: dict[str, int]) -> None:
        here = reference()
        if here is None:
            gc.callbacks.remove(retry)  # the thread is gone
        elif phase == "stop" and threading.get_ident() == thread:
            here.settle()

    return retry


class Threads(threading.local):
    """Holds every thread's casts; the one owner of per-thread state."""

    def __init__(self) -> None:
        self.here = ThreadCasts()
