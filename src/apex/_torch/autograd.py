"""The backward pass and the autocast blocks that this thread is in."""

from __future__ import annotations

from collections.abc import Callable
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


def at_end_of_pass(fn: Callable[[], object]) -> None:
    """Calls ``fn`` at the end of the backward pass that runs the calling code."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(fn)
