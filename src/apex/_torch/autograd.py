"""The backward pass that runs in this thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def plain_backward_id() -> int:
    """Returns -1: without torch's ids, a backward pass cannot be distinguished from other code."""
    return -1


backward_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", plain_backward_id)
"""Returns the id of the backward pass that runs the calling code, -1 outside of one."""


def at_end_of_pass(fn: Callable[[], object]) -> None:
    """Calls ``fn`` at the end of the backward pass that runs the calling code, if torch can."""
    engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is not None:
        engine.queue_callback(fn)
