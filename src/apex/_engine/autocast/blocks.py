"""Blocks of this thread in which op casts are off, or which name those of backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from apex._core.op_table import CastSpec
from apex._engine.autocast.thread_casts import State, ThreadCasts, threads
from apex._torch.dynamo import untraced


class UncastBlock:
    """Turns the casts of every region off in this thread, even in regions that run inside.

    Cheaper than ``torch.autocast(enabled=False)``. Its exit is idempotent, and callers exit it in
    two ``finally`` clauses; see Note [Interrupted blocks].

    Args:
        others: Device types to turn off beside those of this thread's own casts.
    """

    _before: State | None = None
    _others: Sequence[str] = ()

    def __init__(self, others: Sequence[str] = ()) -> None:
        self._others = others

    @untraced
    def __enter__(self) -> State:
        """Returns the state that the exit restores."""
        here = threads.current
        if here.stale:
            here.settle()
        self._here = here
        devices = {*here.specs, *self._others} if self._others else here.specs
        self._before = before = here.state_with(devices)
        self._before = before = here.turn_off(before, for_runs=True)
        return before

    @untraced
    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            self._here.restore(self._before)


class PassCasts:
    """Has Python code in this thread's backward passes mix dtypes by ``casts``.

    ``None`` stands for the thread's own casts. Changes nothing outside of passes. Its exit is
    idempotent.
    """

    _here: ThreadCasts | None = None

    def __init__(self, casts: CastSpec | None) -> None:
        self._casts = casts

    @untraced
    def __enter__(self) -> None:
        here = threads.current
        self._before = here.pass_casts
        self._here = here
        here.pass_casts = self._casts

    @untraced
    def __exit__(self, *error: object) -> None:
        if self._here is not None:
            self._here.pass_casts = self._before


class no_casts(ExitStack):  # noqa: N801 - reads as a function, like torch.no_grad
    """An :class:`UncastBlock` for any caller; reentrant and reusable.

    The ExitStack runs every callback, even if a Ctrl-C interrupts one.
    """

    def __init__(self, others: Sequence[str] = ()) -> None:
        super().__init__()
        self._others = others

    @untraced
    def __enter__(self) -> Any:
        block = UncastBlock(self._others)
        self.push(block.__exit__)
        self.push(block.__exit__)
        try:
            block.__enter__()
            return self
        except BaseException:
            self.close()
            raise
