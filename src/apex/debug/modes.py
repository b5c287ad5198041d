"""Enters and exits a dispatch mode below the modes that are already active."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode


@contextmanager
def suspend_modes(until: TorchDispatchMode | None = None) -> Iterator[None]:
    """Suspends this thread's dispatch modes inside the block.

    A mode entered inside the block ends up below them. Exiting a mode pops the top of torch's
    stack, whichever mode that is, so the code that entered the suspended modes still pops its own.
    Only the base class's methods run: a mode's own ``__exit__`` may print a table, for example.

    Args:
        until: Suspends only the modes above this one; None suspends all.
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
