"""The context that enters a dispatch mode over whole iterations, and leaves nothing behind."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

SomeTrace = TypeVar("SomeTrace", bound="Trace")


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
                    f"{self._NAME} got {type(model).__name__}; it takes models (nn.Module)."
                )
        self._models = models
        self._hooks, self._modes = ExitStack(), ExitStack()
        self.mode: TorchDispatchMode | None = None

    def __enter__(self: SomeTrace) -> SomeTrace:
        """Starts tracing this thread."""
        self.mode = mode = self._new_mode()
        tracker = mode.tracker
        with ExitStack() as hooks, ExitStack() as modes:
            hooks.callback(tracker.detach)
            tracker.attach()
            modes.callback(register_optimizer_step_pre_hook(mode.enter_step).remove)
            modes.callback(register_optimizer_step_post_hook(mode.leave_step).remove)
            if self._may_compile():
                modes.enter_context(torch.compiler.set_stance("force_eager"))
            modes.enter_context(mode)
            self._hooks, self._modes = hooks.pop_all(), modes.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Stops tracing, removes all hooks and releases the models."""
        self.stop_mode()
        self._hooks.close()
        self._models = ()
        self._release()

    def stop_mode(self) -> None:
        """Exits the modes but keeps the modules' hooks, over which torch may be iterating."""
        self.mode = None
        self._modes.close()

    def _new_mode(self) -> Any:
        """Returns a dispatch mode with a ``tracker`` and hooks for the steps of optimizers."""
        raise NotImplementedError

    def _may_compile(self) -> bool:
        return "torch._dynamo" in sys.modules  # otherwise, nothing is compiled

    def _release(self) -> None:
        """Releases what the trace held beside the modes."""
