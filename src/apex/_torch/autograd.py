"""autograd's backward passes: which one runs in this thread, and one that function modes follow."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


def plain_backward_id() -> int:
    """Returns -1: without torch's number a backward pass cannot be told from other code."""
    return -1


backward_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", plain_backward_id)
"""Returns the number of autograd's backward pass that calls in this thread, -1 outside of one."""


def plain_run_backward(tensor: Tensor, gradient: Tensor, keep: bool, create_graph: bool) -> None:
    """Does what ``tensor.backward(gradient)`` does, with this thread's function modes on in it.

    torch takes a mode off while it handles a call, and a call that is given an edge of the graph in
    place of a tensor is not handled.

    Args:
        tensor: Where to begin.
        gradient: Its gradient.
        keep: Whether to keep the graph.
        create_graph: Whether the gradients get a graph of their own.
    """
    torch.autograd.backward([get_gradient_edge(tensor)], [gradient], keep, create_graph)


def _run_backward(tensor: Tensor, gradient: Tensor, keep: bool, create_graph: bool) -> None:
    """Does so in 30 us less."""
    torch.autograd.graph._engine_run_backward(
        *((tensor,), (gradient,), keep, create_graph, ()),
        allow_unreachable=True,
        accumulate_grad=True,
    )


run_backward = (
    _run_backward if "_engine_run_backward" in vars(torch.autograd.graph) else plain_run_backward
)
