"""A stack of inverses: what a failed attempt has done is taken back, the last thing first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Undo:
    """Inverses of what was done so far.

    An inverse must not allocate device memory: it may run because that has run out.
    """

    def __init__(self) -> None:
        """Starts with nothing to undo."""
        self._inverses: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def push(self, inverse: Callable[..., object], /, *args: Any) -> None:
        """Adds ``inverse(*args)``, which takes back what is done next or was just done."""
        self._inverses.append((inverse, args))

    def undo(self) -> None:
        """Takes everything back, the last first."""
        while self._inverses:
            inverse, args = self._inverses.pop()
            inverse(*args)


@contextmanager
def all_or_nothing() -> Iterator[Undo]:
    """Undoes what was pushed inside where an exception leaves the block."""
    done = Undo()
    try:
        yield done
    except BaseException:
        done.undo()
        raise
