"""Registers the autocast kernels that a device lacks while any cast region lives."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.compiler import config as compiler_config

from apex._core.op_table import CastSpec
from apex._engine.autocast.kernels import Coverage, Group, ThreadRules
from apex._torch import autograd, dispatcher
from apex._torch.dispatcher import AUTOCAST_KEYS
from apex._torch.dynamo import is_compiling_here


class Registry:
    """The one owner of kernels: each exists while a registration needs it.

    So does the wrapper of backward passes, in which the thread's rules turn casts off.

    A registration may end in any thread and inside a garbage collection, so its end is only queued;
    the next thread that gets the lock processes the queue.

    Note [Compiled code outlives the kernels]
        Code from ``torch.compile`` has the casts of these kernels built in, but neither dynamo's
        guards nor the caches on disk take them into account: a second process without apex once
        loaded code from the cache that computed in fp32 where its own rules give bf16. So we set a
        cache tag of our own while kernels are registered, and reset dynamo when the rules change.

    Args:
        rules: The op casts of the calling thread.
    """

    def __init__(self, rules: ThreadRules) -> None:
        self._rules = rules
        self._lock = threading.Lock()
        self._queue: deque[Callable[[], None]] = deque()
        self._registrations: dict[int, _Registration] = {}
        self._kernels: dict[Group, _Kernels] = {}
        self._coverage: dict[str, Coverage] = {}
        self._numbers = itertools.count()
        self._tag_before: str | None = None
        self._unwrap: Callable[[], None] | None = None

    def register(self, spec: CastSpec, *, rules: bool = True) -> int:
        """Registers the kernels for ``spec``; returns the number for :meth:`unregister`.

        Args:
            spec: Rows and device types.
            rules: Whether :meth:`newest` may return the spec.

        Raises:
            ValueError: If a device type has no autocast known to us.
        """
        unknown = [device for device in spec.device_types if device not in AUTOCAST_KEYS]
        if unknown:
            raise ValueError(
                f"Op casts (O1, O4) got a model on {', '.join(unknown)}; they work on "
                f"{', '.join(AUTOCAST_KEYS)}. Use a level without op casts (O0, O2, O3, O5) there."
            )
        number = next(self._numbers)
        try:
            with self._lock:
                self._registrations[number] = _Registration(spec, rules)
                for device in spec.device_types:
                    coverage = self._coverage_of(device)
                    for group in (*coverage.groups(spec.table), coverage.passed_on):
                        self._acquire(number, group)
                self._update_cache_tag()
                if self._unwrap is None:
                    self._unwrap = autograd.wrap_backward(self._rules.run_backward)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to report
                self.unregister(number)
            raise
        self._process_queue()
        return number

    def replace_native(self, number: int) -> None:
        """Replaces torch's own kernels with ours on the device types of a live registration.

        Ours cost 3 us more per call, but handle float64, and sessions that ended in another thread.
        """
        registration = self._registrations.get(number)
        if registration is not None and not registration.replaces_native:
            registration.replaces_native = True
            self._queue.append(functools.partial(self._replace_native, number))
            self._process_queue()

    def replace_native_of(self, spec: CastSpec) -> None:
        """Replaces torch's own kernels for all registrations of one spec object."""
        for number, registration in list(self._registrations.items()):
            if registration.spec is spec:
                self.replace_native(number)

    def unregister(self, number: int) -> None:
        """Ends a registration; safe in finalizers and in any thread."""
        self._queue.append(functools.partial(self._release, number))
        self._process_queue()

    def newest(self, device: str) -> CastSpec | None:
        """Returns the spec of the newest live session for a device type.

        Prefers one whose dtype is the thread's autocast dtype.
        """
        registrations = reversed(list(self._registrations.values()))
        specs = [each.spec for each in registrations if each.rules and each.covers(device)]
        dtype = torch.get_autocast_dtype(device)
        return next((spec for spec in specs if spec.dtype is dtype), specs[0] if specs else None)

    def _coverage_of(self, device: str) -> Coverage:
        if device not in self._coverage:
            self._coverage[device] = Coverage(device)
        return self._coverage[device]

    def _acquire(self, number: int, group: Group) -> None:
        held = self._registrations[number].groups
        if group in held:
            return
        if group not in self._kernels:
            kernels = self._coverage_of(group.device).kernels(group, self._rules)
            self._kernels[group] = _Kernels(
                dispatcher.register(kernels, AUTOCAST_KEYS[group.device])
            )
        self._kernels[group].registrations += 1
        held.append(group)

    def _process_queue(self) -> None:
        while self._queue and self._lock.acquire(blocking=False):
            try:
                if self._queue:  # another thread may have emptied it
                    self._queue.popleft()()
            finally:
                self._lock.release()

    def _replace_native(self, number: int) -> None:
        if number in self._registrations:
            for device in self._registrations[number].spec.device_types:
                for group in self._coverage_of(device).native_groups():
                    self._acquire(number, group)

    def _release(self, number: int) -> None:
        registration = self._registrations.pop(number, None)
        for group in registration.groups if registration is not None else ():
            kernels = self._kernels[group]
            kernels.registrations -= 1
            if not kernels.registrations:
                del self._kernels[group]
                kernels.remove()
        self._update_cache_tag()
        if not self._registrations and self._unwrap is not None:
            self._unwrap()
            self._unwrap = None

    def _update_cache_tag(self) -> None:
        """Sets or restores the cache tag; see Note [Compiled code outlives the kernels]."""
        specs = [registration.spec for registration in self._registrations.values()]
        rules = {repr((sorted(s.table.rows.items()), s.allow_banned)) for s in specs}
        if self._tag_before is None:
            self._tag_before = compiler_config.cache_key_tag
        tag = self._tag_before
        if rules:
            digest = hashlib.sha256("\n".join(sorted(rules)).encode()).hexdigest()
            tag = f"{tag}apex-amp-{digest[:16]}"
        else:
            self._tag_before = None
        if compiler_config.cache_key_tag != tag:
            compiler_config.cache_key_tag = tag
            _reset_dynamo()


@dataclass
class _Registration:
    spec: CastSpec
    rules: bool
    replaces_native: bool = False
    groups: list[Group] = field(default_factory=list)

    def covers(self, device: str) -> bool:
        return device in self.spec.device_types


@dataclass
class _Kernels:
    remove: Callable[[], None]
    registrations: int = 0


def _reset_dynamo() -> None:
    """Drops dynamo's code if dynamo is loaded; importing it here would cost seconds.

    Does nothing while dynamo traces, which a garbage collection can interrupt; a later change of
    the rules then drops the code.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and not is_compiling_here():
        dynamo.reset()
