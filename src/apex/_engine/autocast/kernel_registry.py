"""Registers the autocast kernels that a device lacks, while any cast region lives."""

from __future__ import annotations

import hashlib
import itertools
import sys
import threading
import warnings
from collections import deque
from dataclasses import dataclass, field

import torch

from apex._core.op_table import CastSpec
from apex._engine.autocast.kernels import KEYS, Coverage, Group, Ruling, build_kernel
from apex._torch.dynamo import is_compiling_here


class Registry:
    """The one owner of registered kernels: a kernel lives while a lease asks for it.

    A lease may end in any thread and inside a garbage collection, so ending one only queues it;
    whoever can take the lock settles the queue.

    Note [Compiled code outlives the kernels]
        Code from ``torch.compile`` holds the casts of these kernels, and neither dynamo's guards
        nor the caches on disk know of them: a second process without apex was seen to take code
        from the cache that computes fp32 where its own rules give bf16. So the cache tag is one of
        ours while kernels are registered, and dynamo forgets its code when the rules change.

    Args:
        ruling: Finds the spec of the calling thread, for the kernels.
    """

    def __init__(self, ruling: Ruling) -> None:
        self._ruling = ruling
        self._lock = threading.Lock()
        self._ended: deque[int] = deque()
        self._leases: dict[int, _Lease] = {}
        self._kernels: dict[Group, _Kernels] = {}
        self._coverage: dict[str, Coverage] = {}
        self._numbers = itertools.count()
        self._tag_before: str | None = None

    def lease(self, spec: CastSpec) -> int:
        """Registers what ``spec`` needs; returns the number to end the lease by.

        Raises:
            ValueError: If a device type has no autocast that we know.
        """
        unknown = [device for device in spec.device_types if device not in KEYS]
        if unknown:
            raise ValueError(
                f"Op casts (O1, O4) got a model on {', '.join(unknown)}; they work on "
                f"{', '.join(KEYS)}. Use a level without op casts (O0, O2, O3, O5) there."
            )
        number = next(self._numbers)
        try:
            with self._lock:
                self._leases[number] = _Lease(spec)
                for device in spec.device_types:
                    for group in self._coverage_of(device).groups(spec.table):
                        self._hold(number, group)
                self._mark_compile_caches()
        except BaseException:
            self.end(number)
            raise
        self._settle()
        return number

    def add_doubles(self, number: int) -> None:
        """Adds to a lease kernels that cast float64 for the operators that torch casts itself."""
        with self._lock:
            for device in self._leases[number].spec.device_types:
                for group in self._coverage_of(device).native_low_precision():
                    self._hold(number, group)
        self._settle()

    def end(self, number: int) -> None:
        """Ends a lease; safe in finalizers and in any thread."""
        self._ended.append(number)
        self._settle()

    def newest(self, device: str, dtype: torch.dtype) -> CastSpec | None:
        """Returns the spec of the newest living lease for a device type and dtype."""
        for lease in reversed(list(self._leases.values())):
            if lease.spec.dtype is dtype and device in lease.spec.device_types:
                return lease.spec
        return None

    def _coverage_of(self, device: str) -> Coverage:
        if device not in self._coverage:
            self._coverage[device] = Coverage(device)
        return self._coverage[device]

    def _hold(self, number: int, group: Group) -> None:
        held = self._leases[number].groups
        if group in held:
            return
        if group not in self._kernels:
            self._kernels[group] = _Kernels(self._register(group))
        self._kernels[group].leases += 1
        held.append(group)

    def _register(self, group: Group) -> torch.library.Library:
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        native = self._coverage_of(group.device).native
        with warnings.catch_warnings():
            # torch warns of kernels that take the place of its own; ours call those, and go again.
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for op in group.ops:
                kernel = build_kernel(op, group.device, self._ruling, native.get(op))
                library.impl(op, kernel, KEYS[group.device], with_keyset=True)  # type: ignore[no-untyped-call]
        return library

    def _settle(self) -> None:
        while self._ended and self._lock.acquire(blocking=False):
            try:
                if self._ended:  # another thread may have been faster
                    self._release(self._ended.popleft())
            finally:
                self._lock.release()

    def _release(self, number: int) -> None:
        for group in self._leases.pop(number).groups:
            kernels = self._kernels[group]
            kernels.leases -= 1
            if not kernels.leases:
                del self._kernels[group]
                kernels.library._destroy()  # type: ignore[no-untyped-call]
        self._mark_compile_caches()

    def _mark_compile_caches(self) -> None:
        """Sets or gives back the cache tag; see Note [Compiled code outlives the kernels]."""
        config = torch.compiler.config
        specs = [lease.spec for lease in self._leases.values()]
        rules = {repr((sorted(s.table.rows.items()), s.allow_banned)) for s in specs}
        if self._tag_before is None:
            self._tag_before = config.cache_key_tag
        tag = self._tag_before
        if rules:
            digest = hashlib.sha256("\n".join(sorted(rules)).encode()).hexdigest()
            tag = f"{tag}apex-amp-{digest[:16]}"
        else:
            self._tag_before = None
        if config.cache_key_tag != tag:
            config.cache_key_tag = tag
            _forget_compiled()


@dataclass
class _Lease:
    spec: CastSpec
    groups: list[Group] = field(default_factory=list)


@dataclass
class _Kernels:
    library: torch.library.Library
    leases: int = 0


def _forget_compiled() -> None:
    """Drops dynamo's code, if dynamo is loaded at all: importing it here would cost seconds.

    Not in the middle of its tracing, where a garbage collection may have brought us: the code then
    goes before the next kernels come.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and not is_compiling_here():
        dynamo.reset()
