"""Marks functions that ``torch.compile`` must not trace; detects compilation and export."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._dispatch.python import no_python_dispatcher
from torch.utils._python_dispatch import _disable_current_modes

from apex._torch.dispatcher import TORCH_VERSION

P = ParamSpec("P")
R = TypeVar("R")

# torch.compiler.disable does the same, but imports all of dynamo and costs 2 us per call.
_eval_frame: Any = torch._C._dynamo.eval_frame


def _mark(fn: Callable[P, R], *, recursive: bool, disable: bool = True) -> Callable[P, R]:
    set_strategy = getattr(_eval_frame, "set_code_exec_strategy", None)
    if set_strategy is None:  # torch 2.6
        marked: Any = _without_dynamo(fn) if recursive else fn
        _eval_frame.skip_code(marked.__code__)
    else:
        marked = fn
        action = _eval_frame._FrameAction
        inside = action.SKIP if recursive else action.DEFAULT
        set_strategy(marked.__code__, _eval_frame._FrameExecStrategy(action.SKIP, inside))
    marked._torchdynamo_disable = disable  # dynamo checks this before it traces a call
    result: Callable[P, R] = marked
    return result


def _without_dynamo(fn: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(fn)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        callback = _eval_frame.set_eval_frame(None)
        try:
            return fn(*args, **kwargs)
        finally:
            _eval_frame.set_eval_frame(callback)

    return called


def untraced(fn: Callable[P, R]) -> Callable[P, R]:
    """Marks ``fn`` and everything it calls to run in eager mode.

    Compiled code around it has a graph break at the call.
    """
    return _mark(fn, recursive=True)


@untraced  # compiled code may call it to mark closures
def untraced_frame(fn: Callable[P, R]) -> Callable[P, R]:
    """Marks ``fn`` to run in eager mode; functions that it calls may be compiled."""
    return _mark(fn, recursive=False)


def inlined(fn: Callable[P, R]) -> Callable[P, R]:
    """Marks ``fn`` as :func:`untraced` does, except where compiled code traces a call."""
    # Dynamo of torch 2.6 cannot trace the wrapper that turns it off for calls.
    return _mark(fn, recursive=TORCH_VERSION >= (2, 7), disable=False)


def at_tracing(fn: Callable[P, R]) -> Callable[P, R]:
    """Marks ``fn`` to be called when its caller is traced, and not by the compiled code."""
    marked: Any = fn
    marked._dynamo_marked_constant = True  # what torch.compiler.assume_constant_result sets
    return fn


def recompile_on_change(function: Callable[..., object], *args: Hashable) -> None:
    """Adds a guard to the code that dynamo traces: it holds while the function's result is equal.

    Before each run, dynamo calls ``function(*args)``. If the result is another than at tracing, it
    compiles the code again. The guard keeps the arguments and the result alive.
    """
    context: Any = torch._guards.TracingContext.try_get()
    sources: Any = sys.modules.get("torch._dynamo.source")
    if context is not None and sources is not None:  # neither in an export without dynamo
        # As before each run: outside of the modes by which torch.export traces.
        with _disable_current_modes(), no_python_dispatcher():
            expected = function(*args)
        create = _guard_of(function, args, expected)
        guard: Any = torch._guards.Guard(sources.GlobalStateSource(), create)
        context.guards_context.dynamo_guards.add(guard)


@functools.cache  # equal guards are one, in however many operators of the code
def _guard_of(
    function: Callable[..., object], args: tuple[Hashable, ...], expected: Hashable
) -> Callable[..., None]:
    def is_unchanged(frame_locals: object) -> bool:
        return function(*args) == expected

    def create(builder: Any, guard: object) -> None:
        root = builder.guard_manager.root
        try:
            root.add_lambda_guard(is_unchanged, [function.__name__], None)
        except TypeError:  # older releases (2.6) take no stack of the user's code
            root.add_lambda_guard(is_unchanged, [function.__name__])

    return create


is_jit_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
"""Returns whether ``torch.jit.trace`` runs the calling code."""


def is_tracing() -> bool:
    """Returns whether dynamo traces a function in this thread."""
    return torch._guards.TracingContext.try_get() is not None


def is_compiling() -> bool:
    """Returns whether this thread traces or exports; torch's question is about all threads."""
    if not torch.compiler.is_compiling():
        return False
    if torch.compiler.is_dynamo_compiling() or is_tracing():
        return True
    return torch._C._len_torch_dispatch_stack() > 0  # an export without dynamo


@untraced_frame
def is_compiling_here() -> bool:
    """Returns whether this thread is compiling or running compiled code."""
    callback = _eval_frame.set_eval_frame(None)  # what dynamo calls for each frame of this thread
    _eval_frame.set_eval_frame(callback)
    return callable(callback) or is_tracing() or torch._guards.CompileContext.try_get() is not None


CONFIG = "torch.utils._config_module"
"""The module that changes torch's config, which it keeps in ContextVars.

Before Python 3.12, the collector may run inside ``ContextVar.set``, which crashes if a finalizer
sets another one.
"""

DYNAMO = "torch._dynamo.eval_frame"
"""The module that calls compiled code, and restores the thread's dispatch keys after it."""


def is_called_in(module: str) -> bool:
    """Returns whether the calling code, such as a finalizer, interrupts code of a module."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False


@at_tracing  # the new exporter traces by dynamo where its first way fails
def is_exporting_onnx() -> bool:
    """Returns whether ``torch.onnx`` exports a model; false where its own question fails."""
    if "torch.onnx" not in sys.modules:
        return False
    try:
        return bool(torch.onnx.is_in_onnx_export())
    except ImportError:  # torch 2.13 asks a package that only its new exporter needs
        return False
