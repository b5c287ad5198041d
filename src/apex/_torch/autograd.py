"""The backward pass, autocast blocks and function modes that this thread is in."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from apex._torch.copies import capturing
from apex._torch.dispatch_modes import records_operators
from apex._torch.dynamo import untraced

_engine: Any = torch.autograd.Variable._execution_engine

backward_id: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the id of the backward pass that runs the calling code, -1 outside of one."""


@untraced
def autocast_depth() -> int:
    """Returns how many ``torch.autocast`` blocks this thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def is_recorded(device: torch.device) -> bool:
    """Returns whether operators on a device are recorded, or run by a mode or transform of torch.

    They are in a CUDA graph, inference mode, ``make_fx``, ``torch.func`` and ``torch.jit.trace``.
    """
    return (
        torch.is_inference_mode_enabled()  # where gradients may be enabled, but have no effect
        or (torch._C._len_torch_dispatch_stack() > 0 and records_operators())
        or torch._C._get_tracing_state() is not None
        or is_transformed()
        or capturing(device)
    )


def is_transformed() -> bool:
    """Returns whether a transform of ``torch.func`` runs, whose passes add to no gradient."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def unrecorded() -> Iterator[None]:
    """A block whose operators a trace of ``torch.jit.trace`` does not record."""
    trace: Any = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(trace)  # type: ignore[attr-defined]


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


def leaves_of(output: Tensor) -> list[Tensor]:
    """Returns the leaves that a backward pass from ``output`` reaches, as far as the graph tells.

    The graph does not contain what a checkpoint recomputes.
    """
    leaves: list[Tensor] = []
    seen = {None}
    nodes: list[Any] = [output.grad_fn]
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            nodes.append(following)
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)
    return leaves


def adds_to_any(params: Iterable[Tensor]) -> bool:
    """Returns whether the backward pass that runs the calling code may add to these gradients.

    ``torch.autograd.grad`` does not.
    """
    if _engine.is_checkpoint_valid():  # a pass for all leaves, also those in checkpoints
        return True
    for param in params:
        if param.requires_grad:
            node = torch.autograd.graph.get_gradient_edge(param).node
            try:
                if torch._C._will_engine_execute_node(node):
                    return True
            except RuntimeError:  # as torch answers in torch.autograd.grad for the parameter
                return False
    return False


def at_end_of_pass(fn: Callable[[], object]) -> None:
    """Calls ``fn`` at the end of the backward pass that runs the calling code.

    After what others have left for its end, such as DistributedDataParallel's averages.
    """
    _engine.queue_callback(functools.partial(_engine.queue_callback, fn))


def leave_function_mode(mode: TorchFunctionMode) -> None:
    """Removes a mode that this thread has entered, also from under others.

    A mode that torch has left for the call of its handler comes back above what entered meanwhile.
    """
    above = []
    while (top := _pop_mode()) is not mode:  # type: ignore[no-untyped-call]
        above.append(top)
    for other in reversed(above):
        _push_mode(other)  # type: ignore[no-untyped-call]
