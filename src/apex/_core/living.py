"""Weakly held objects."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Living(Generic[T]):
    """Weakly held objects, in the order in which they were added.

    Unlike a ``WeakSet``, it may be iterated while other threads add objects.
    """

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[T]] = {}

    def add(self, item: T) -> None:
        """Adds an object; idempotent."""
        key = id(item)
        self._references[key] = weakref.ref(item, lambda _: self._references.pop(key, None))

    def __iter__(self) -> Iterator[T]:
        for reference in list(self._references.values()):
            item = reference()
            if item is not None:
                yield item

    def __bool__(self) -> bool:
        return bool(self._references)
