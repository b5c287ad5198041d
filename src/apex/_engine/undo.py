"""An undo stack: reverts a failed operation step by step, last step first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Undo:
    """The inverses of the steps so far.

    An inverse must not allocate device memory: it may run because memory has run out.
    """

    def __init__(self) -> None:
        self._inverses: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def push(self, inverse: Callable[..., object], /, *args: Any) -> None:
        """Adds ``inverse(*args)``, which reverts the previous or the next step."""
        self._inverses.append((inverse, args))

    def undo(self) -> None:
        """Reverts every step, last first."""
        while self._inverses:
            inverse, args = self._inverses.pop()
            inverse(*args)


@contextmanager
def all_or_nothing(within: Undo | None = None) -> Iterator[Undo]:
    """Yields an undo stack, and runs it if the block raises.

    Args:
        within: The stack of a larger operation, which reverts what the block has done, too.
    """
    done = Undo()
    if within is not None:
        within.push(done.undo)
    try:
        yield done
    except BaseException:
        done.undo()
        raise
