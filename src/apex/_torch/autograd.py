"""The backward pass that runs in this thread, and a hook around every backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from apex._torch.dynamo import untraced_frame


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


Entries = tuple[tuple[ModuleType, str], ...]
"""Modules, and names of functions in them, that run backward passes."""

plain_entries: Entries = ()
"""None: backward passes outside ``scale_loss`` run under their thread's casts."""

_NAME = "_engine_run_backward"
_found = _NAME in vars(torch.autograd) and _NAME in vars(torch.autograd.graph)

entries = ((torch.autograd, _NAME), (torch.autograd.graph, _NAME)) if _found else plain_entries
"""What every backward pass that Python code begins goes through."""


def wrap_backward(around: Callable[..., Any]) -> Callable[[], None]:
    """Has ``around(run, *args, **kwargs)`` called for each ``run(*args, **kwargs)`` of a pass.

    Args:
        around: Calls ``run``, which runs the pass, and returns its result.

    Returns:
        Reverts it, where no other code has wrapped the same since.
    """
    reverts = [_wrap(module, name, around) for module, name in entries]

    def revert() -> None:
        for each in reverts:
            each()

    return revert


def _wrap(module: ModuleType, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    run: Callable[..., Any] = vars(module)[name]

    @untraced_frame
    @functools.wraps(run)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(run, *args, **kwargs)

    def revert() -> None:
        if vars(module)[name] is wrapped:
            setattr(module, name, run)

    setattr(module, name, wrapped)
    return revert
