"""The backward pass that runs in this thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

backward_id: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the id of the backward pass that runs the calling code, -1 outside of one."""


def at_end_of_pass(fn: Callable[[], object]) -> None:
    """Calls ``fn`` at the end of the backward pass that runs the calling code."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(fn)
