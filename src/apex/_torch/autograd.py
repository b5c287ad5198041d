"""The backward pass that runs in this thread, and backward passes under function modes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


def plain_backward_id() -> int:
    """Returns -1: without torch's ids, a backward pass cannot be distinguished from other code."""
    return -1


backward_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", plain_backward_id)
"""Returns the id of the backward pass that runs the calling code, -1 outside of one."""


def plain_run_backward(tensor: Tensor, gradient: Tensor, keep: bool, create_graph: bool) -> None:
    """Runs ``tensor.backward(gradient)`` with this thread's function modes active inside.

    torch disables a mode while the mode handles a call. Modes do not handle a call that receives a
    graph edge instead of a tensor.

    Args:
        tensor: Root of the backward pass.
        gradient: The root's gradient.
        keep: Whether to keep the graph.
        create_graph: Whether to build a graph of the gradients.
    """
    torch.autograd.backward([get_gradient_edge(tensor)], [gradient], keep, create_graph)


def _run_backward(tensor: Tensor, gradient: Tensor, keep: bool, create_graph: bool) -> None:
    """Does the same, 30 us faster."""
    torch.autograd.graph._engine_run_backward(
        *((tensor,), (gradient,), keep, create_graph, ()),
        allow_unreachable=True,
        accumulate_grad=True,
    )


run_backward = (
    _run_backward if "_engine_run_backward" in vars(torch.autograd.graph) else plain_run_backward
)
