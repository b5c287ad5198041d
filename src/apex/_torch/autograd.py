"""The backward pass that runs in this thread."""

from __future__ import annotations

from collections.abc import Callable

import torch


def plain_backward_id() -> int:
    """Returns -1: without torch's ids, a backward pass cannot be distinguished from other code."""
    return -1


backward_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", plain_backward_id)
"""Returns the id of the backward pass that runs the calling code, -1 outside of one."""
