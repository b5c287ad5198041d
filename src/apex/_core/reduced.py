"""Copies of objects from another value than that of their ``__reduce_ex__``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _Reduced:
    """Stands in for an object in ``copy``, which follows a given reduced value."""

    def __init__(self, item: object, reduced: Any, memo: dict[int, Any]) -> None:
        self._item = item
        self._reduced = reduced
        self.memo = memo

    def __reduce_ex__(self, protocol: Any) -> Any:
        func, args, *rest = self._reduced

        def make(*args: Any) -> Any:
            # Registered before its state is copied, which may refer back to the object.
            new = self.memo[id(self._item)] = func(*args)
            return new

        return make, args, *rest


def copied_by(
    copied: Callable[[Any], Any], item: object, reduced: Any, memo: dict[int, Any]
) -> Any:
    """Returns the copy that ``copied`` makes of ``item`` from ``reduced``."""
    if isinstance(reduced, str):
        return item
    given = _Reduced(item, reduced, memo)
    try:
        return copied(given)
    finally:
        given.memo = {}  # breaks the reference cycle, which would outlive the copy
