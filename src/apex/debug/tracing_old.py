"""Traces of whole iterations: the context, which leaves nothing behind, and its dispatch mode."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from apex._torch.dispatch_modes import computes_shapes_only
from apex.debug import tensors
from apex.debug.module_tracker import ModuleTracker
from apex.debug.preserve_state import eager
from apex.debug.tensors import OperatorCall

SomeTrace = TypeVar("SomeTrace", bound="Trace")

_EMPTY = ("empty", "new_empty", "resize", "set_")
"""How the names of operators begin that give uninitialized memory."""


def is_uninitialized(name: str) -> bool:
    """Returns whether the operator of this name, such as ``"aten.empty_like"``, sets no values."""
    return name.rpartition(".")[2].lstrip("_").startswith(_EMPTY)


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator on plain tensors, in the process that entered it.

    Attributes:
        tracker: Knows the running module, direction and line.
    """

    # Their bodies consist of operators, which are traced.
    supports_higher_order_operators = True

    def __init__(self, tracker: ModuleTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = tracker
        self._process = os.getpid()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # In a forked data loader worker, or without values.
        if os.getpid() != self._process or computes_shapes_only():
            return func(*args, **(kwargs or {}))
        return self._traced(func, types, args, kwargs or {})

    # Not in __torch_dispatch__ itself: torch wraps it anew in each subclass, at 3 us a call.
    def _traced(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not all(map(tensors.is_plain, types)):  # its inner operators come here next
            return NotImplemented
        if not isinstance(func, torch._ops.OpOverload):
            return self._run(func, args, kwargs)
        self.tracker.record_site()
        return self._operator(OperatorCall(func, tensors.traits(func), args, kwargs))

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def _operator(self, call: OperatorCall) -> Any:
        """Runs and inspects one call of an operator."""
        raise NotImplementedError


class Trace:
    """A context that traces every operator of this thread, and of its backward passes.

    Attributes:
        mode: The active dispatch mode; None before and after the trace.
    """

    _NAME: str

    def __init__(self, *models: nn.Module) -> None:
        """Prepares a trace; tracing starts on entry.

        Raises:
            TypeError: If an argument is not a module.
        """
        for model in models:
            if not isinstance(model, nn.Module):
                raise TypeError(
                    f"{self._NAME} got {type(model).__name__}; it takes models (nn.Module), one "
                    "by one, and a GradScaler as scaler=."
                )
        self._models = models
        self._thread = 0
        self._entered = False
        self._hooks, self._modes = ExitStack(), ExitStack()
        self.mode: TorchDispatchMode | None = None

    def __enter__(self: SomeTrace) -> SomeTrace:
        """Starts tracing this thread.

        Raises:
            RuntimeError: If the trace was entered before.
        """
        if self._entered:
            raise RuntimeError(
                f"This trace was entered before, and a trace traces once. Call {self._NAME} again."
            )
        self._entered, self._thread = True, threading.get_ident()
        self.mode = mode = self._new_mode()
        with ExitStack() as hooks, ExitStack() as modes:
            hooks.enter_context(mode.tracker)
            modes.callback(register_optimizer_step_pre_hook(mode.enter_step).remove)
            modes.callback(register_optimizer_step_post_hook(mode.leave_step).remove)
            modes.enter_context(eager())
            modes.enter_context(mode)
            self._hooks, self._modes = hooks.pop_all(), modes.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Stops tracing, removes all hooks and releases the models.

        Raises:
            RuntimeError: If another thread entered the trace, and goes on tracing.
        """
        if self.mode is not None and self._thread != threading.get_ident():
            raise RuntimeError(
                f"{self._NAME} ends in another thread than it began in, whose operators it traces. "
                "End it in that one: `with` the trace in the function that the thread runs."
            )
        self.stop_mode()
        self._hooks.close()
        self._models = ()

    def stop_mode(self) -> None:
        """Exits the modes but keeps the modules' hooks, over which torch may be iterating."""
        self.mode = None
        self._modes.close()

    def _new_mode(self) -> Any:
        """Returns a dispatch mode with a ``tracker`` and hooks for the steps of optimizers."""
        raise NotImplementedError
