"""The one registry of sessions in this process, which every part of the engine asks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from apex._core.op_table import AutocastSpec


class Casting(Protocol):
    """A session, as the casts of operators know it."""

    spec: AutocastSpec | None
    """Its op casts, until they end."""

    thread: object
    """The thread in which it began, see :func:`apex._engine.autocast.ambient.this_thread`."""

    is_ambient: bool
    """Whether its casts are on in that thread, outside of forward passes."""


T = TypeVar("T")


class WeakList(Generic[T]):
    """Holds objects weakly, oldest first. Any thread may add one, or let one go."""

    def __init__(self) -> None:
        """Starts empty."""
        # A list, as a walk through a WeakSet takes 1 us, and each of our kernels needs one.
        self._references: list[weakref.ref[T]] = []

    def add(self, item: T) -> None:
        """Adds an object, until it is collected."""
        self._references.append(weakref.ref(item, self._references.remove))

    def remove(self, item: T) -> None:
        """Removes an object."""
        self._references.remove(weakref.ref(item))

    def __iter__(self) -> Iterator[T]:
        """Iterates over the objects that live now, oldest first."""
        items: list[T] = []
        for reference in [*self._references]:
            item = reference()
            if item is not None:
                items.append(item)
        return iter(items)


live: WeakList[Casting] = WeakList()
"""All sessions."""


def live_specs(*, begun_in: object = None) -> list[AutocastSpec]:
    """Returns the op casts of live sessions, oldest first.

    Args:
        begun_in: A thread; only the sessions whose casts are on there.
    """
    specs: list[AutocastSpec] = []
    for session in live:
        if session.spec is None:
            continue
        if begun_in is None or (session.is_ambient and session.thread is begun_in):
            specs.append(session.spec)
    return specs
