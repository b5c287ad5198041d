"""Watch every operator, forward and backward, and name the first that overflows."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from apex.debug.faults import Fault
from apex.debug.module_tracker import Whereabouts, unwrapped
from apex.debug.overflow_mode import Watch
from apex.debug.provenance import Lineage


def trace_overflow(*models: nn.Module) -> OverflowTrace:
    """Returns a context that finds the first operator that overflows, with its cause and remedy.

    Enter it around one or more whole iterations, forward and backward; ``optimizer.step`` may be
    inside. Every operator is watched, whoever calls it; the models are there for the names of their
    modules. Infinities that are put somewhere on purpose (masks) are no fault until they make a NaN
    or reach a gradient.

    Each operator is followed by a check and a host sync, so an iteration takes several times as
    long. Models under ``torch.compile`` run uncompiled inside: compiled code is opaque.

    Args:
        models: One or more; as given to ``amp.initialize``, or wrapped for compile or DDP since.

    Returns:
        The :class:`OverflowTrace`, to be entered; its ``first`` is the fault or None.

    Example:
        >>> import torch
        >>> from apex import amp
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Softplus())
        >>> with amp.debug.trace_overflow(model) as trace:
        ...     model(torch.ones(1, 2)).log().sum().backward()
        >>> trace.first is None
        True
        >>> with amp.debug.trace_overflow(model) as trace:
        ...     (model(torch.ones(1, 2)) * 0).log().sum().backward()
        >>> trace.first.op, trace.first.kind, trace.first.cause
        ('aten.log', 'inf', 'domain')
    """
    return OverflowTrace(*models)


class OverflowTrace:
    """What happened inside :func:`trace_overflow`.

    Attributes:
        gradients: Names of parameters that got a gradient that is not finite, in that order.
        mode: The dispatch mode that watches, None before and after.
    """

    def __init__(self, *models: nn.Module) -> None:
        """Watches nothing yet.

        Raises:
            TypeError: For anything but modules.
        """
        for model in models:
            if not isinstance(model, nn.Module):
                raise TypeError(
                    f"trace_overflow got {type(model).__name__}; it takes models (nn.Module)."
                )
        self.gradients: list[str] = []
        self._lineage = Lineage()
        self._models = [unwrapped(model) for model in models]
        self._hooks, self._modes = ExitStack(), ExitStack()
        self.mode: TorchDispatchMode | None = None

    def __enter__(self) -> OverflowTrace:
        """Begins to watch this thread."""
        here = Whereabouts(*self._models)
        self.mode = watch = Watch(here, self._lineage, self._models, self.gradients)
        with ExitStack() as hooks, ExitStack() as modes:
            hooks.callback(here.detach)
            here.attach()
            modes.callback(register_optimizer_step_pre_hook(watch.enter_step).remove)
            modes.callback(register_optimizer_step_post_hook(watch.leave_step).remove)
            if "torch._dynamo" in sys.modules:  # else nothing is compiled
                modes.enter_context(torch.compiler.set_stance("force_eager"))
            modes.enter_context(here.recorder)
            modes.enter_context(watch)
            self._hooks, self._modes = hooks.pop_all(), modes.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Ends it, takes away everything that it attached, and lets go of the models."""
        self.unwatch()
        self._hooks.close()
        self._models = []
        self._lineage.forget()

    def unwatch(self) -> None:
        """Sees no more, but leaves the modules' hooks: torch may be iterating over them."""
        self.mode = None
        self._modes.close()

    @property
    def first(self) -> Fault | None:
        """The first fault, None when all stayed finite or what did not was harmless."""
        return self._lineage.first()

    def to_json(self) -> str:
        """Returns ``{"first": {...} or null, "operators": n, "gradients": [names]}``."""
        first = self.first
        return json.dumps(
            {
                "first": None if first is None else first.as_dict(),
                "operators": self._lineage.time,
                "gradients": self.gradients,
            }
        )

    def __str__(self) -> str:
        """Returns the report."""
        first = self.first
        if first is None:
            return f"No overflow: {self._lineage.time} operators watched, no fault."
        lines = [f"First overflow: {first}"]
        if self.gradients:
            more = len(self.gradients) - 3
            names = ", ".join(self.gradients[:3]) + (f" and {more} more" if more > 0 else "")
            lines.append(f"  hit    the gradients of {names}")
        return "\n".join(lines)
