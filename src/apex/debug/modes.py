"""Enter and leave a dispatch mode below those that are on already, whenever those end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode


@contextmanager
def set_aside(until: TorchDispatchMode | None = None) -> Iterator[None]:
    """Takes this thread's dispatch modes off for the length of the block.

    What the block enters lies below them, so that whoever entered one of them takes off his own
    when he leaves: torch takes off the topmost, whichever that is. Only the base class's methods
    are called, for a mode's own may print a table at its end.

    Args:
        until: Take off only those above this one; all if ``None``.
    """
    above = []
    while (top := _get_current_dispatch_mode()) is not None and top is not until:
        above.append(top)
        TorchDispatchMode.__exit__(top, None, None, None)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for mode in reversed(above):
            TorchDispatchMode.__enter__(mode)  # type: ignore[no-untyped-call]
