"""What ``torch.compile`` leaves alone, and when it is at work."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

# torch.compiler.disable does the same, but loads all of dynamo for it and costs 2 us a call.
_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)


def untraced(fn: Callable[P, R]) -> Callable[P, R]:
    """Marks ``fn`` to run in eager, with all that it calls: bookkeeping that has no graph.

    Code that is compiled around it breaks its graph at the call.
    """
    return _mark(fn, recursive=True)


def untraced_frame(fn: Callable[P, R]) -> Callable[P, R]:
    """Marks ``fn`` to run in eager, while what it calls may be compiled."""
    return _mark(fn, recursive=False)


def at_tracing(fn: Callable[P, R]) -> Callable[P, R]:
    """Marks ``fn`` to be called while code around it is traced, and never by that code."""
    marked: Any = fn
    marked._dynamo_marked_constant = True  # what torch.compiler.assume_constant_result sets
    return fn


def is_compiling_here() -> bool:
    """Returns whether this thread is in a call of compiled code, or compiling."""
    if "torch._dynamo" not in sys.modules:
        return False
    if _eval_frame is not None and callable(_eval_frame.get_eval_frame_callback()):
        return True
    contexts = (torch._guards.CompileContext, torch._guards.TracingContext)
    return any(context.try_get() is not None for context in contexts)


def _mark(fn: Callable[P, R], *, recursive: bool) -> Callable[P, R]:
    set_strategy = getattr(_eval_frame, "set_code_exec_strategy", None)
    if set_strategy is None:
        wrapped: Callable[P, R] = torch._disable_dynamo(fn, recursive=recursive)  # type: ignore[attr-defined]
        return wrapped
    marked: Any = fn
    marked._torchdynamo_disable = True  # asked before a call is traced into
    skip, default = _eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT
    inside = skip if recursive else default
    set_strategy(marked.__code__, _eval_frame._FrameExecStrategy(skip, inside))
    return fn


untraced(untraced_frame)  # it marks closures in calls that may be compiled
