"""Which of autograd's backward passes runs in this thread."""

from __future__ import annotations

from collections.abc import Callable

import torch


def plain_backward_id() -> int:
    """Returns -1: without torch's number a backward pass cannot be told from other code."""
    return -1


backward_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", plain_backward_id)
"""Returns the number of autograd's backward pass that calls in this thread, -1 outside of one."""
