"""The backward pass and the autocast blocks that this thread is in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import torch

from apex._torch.dynamo import untraced

backward_id: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the id of the backward pass that runs the calling code, -1 outside of one."""


@untraced
def autocast_depth() -> int:
    """Returns how many ``torch.autocast`` blocks this thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


_RUNNERS = {
    function.__code__
    for function in (
        torch.autograd.backward,
        torch.autograd.grad,
        torch.autograd.graph._engine_run_backward,
    )
}


def is_formula(*, called_in: Collection[str]) -> bool:
    """Returns whether one of autograd's formulas calls an operator in a backward pass.

    Formulas are C++. So the Python that is next around the operator is what started the pass, and
    none in a device's thread. Frames of the modules in ``called_in`` do not count.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in called_in:
        frame = frame.f_back
    return frame is None or frame.f_code in _RUNNERS


def at_end_of_pass(fn: Callable[[], object]) -> None:
    """Calls ``fn`` at the end of the backward pass that runs the calling code."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(fn)
