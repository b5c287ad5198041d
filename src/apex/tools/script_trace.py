"""An overflow trace around a whole program, which reports the first certain fault."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from apex.debug.causes import finding_of
from apex.debug.overflow import OverflowTrace
from apex.debug.place import Finding
from apex.debug.tracing import Call, Mode, Trace

importlib.import_module("torch._dynamo")  # so that functions compiled later run eagerly


@dataclass(frozen=True)
class Seen:
    """The results of a trace so far.

    Attributes:
        first: The first fault that does not make a dynamic loss scale back off; None without one.
        steps_before: Number of optimizer steps before the fault; without one, of all steps.
        aside: The first inf or NaN that reached nothing, as in an evaluation; None without one.
        uninitialized: Names of parameters that nothing had written before the first step.
        certain: Whether the fault reached a gradient, the loss or a weight.
        harmless: Whether an operator such as clamp limited the values of ``first`` before that.
        gradients: Names of parameters that received a non-finite gradient.
        operators: Number of operators traced.
        steps: Number of optimizer steps completed.
        passes: Number of backward passes that reached a gradient.
        healed: Number of backward passes after which a dynamic loss scale backed off.
    """

    first: Finding | None
    aside: Finding | None
    uninitialized: list[str]
    steps_before: int
    certain: bool
    harmless: bool
    gradients: list[str]
    operators: int
    steps: int
    passes: int
    healed: int


class ScriptTrace(OverflowTrace):
    """An overflow trace around a program, which finds the program's models as they are called.

    A fault is certain once it has reached a gradient, the loss or a weight. Overflows that make a
    dynamic loss scale back off are counted, but they are no faults. Before the next operator
    outside a backward pass, the trace calls ``on_fault``, which may raise. If it returns, the
    program runs on, untraced.
    """

    def __init__(self, *, on_fault: Callable[[], None]) -> None:
        super().__init__()
        self._on_fault = on_fault
        # Whether on_fault was called; the program then runs on, untraced.
        self._is_reported = False

    def __enter__(self) -> ScriptTrace:
        """Starts tracing this thread, and those that the program starts with ``threading``."""
        super().__enter__()
        trace_threads(self, self._hooks)
        return self

    def seen(self) -> Seen:
        """Returns the results so far."""
        births = self._births
        first = births.first(healing=False)
        return Seen(
            first=finding_of(first),
            aside=finding_of(births.aside),
            uninitialized=self.uninitialized,
            steps_before=births.steps if first is None else first.steps,
            certain=births.certain,
            harmless=first is not None and first.limited and first not in births.reached,
            gradients=births.gradients,
            operators=births.time,
            steps=births.steps,
            passes=births.passes,
            healed=len(births.healed),
        )

    def _leave_step(self, optimizer: Optimizer, *_: Any) -> None:
        super()._leave_step(optimizer)
        self._births.count_step()

    def _before(self, call: Call) -> Any:
        if not self._is_reported and self._births.certain and self._tracker.may_stop:
            self._is_reported = True
            self._on_fault()
        if self._is_reported:
            return None
        return super()._before(call)


def trace_threads(trace: Trace, until: ExitStack) -> None:
    """Traces the threads that the program starts with ``threading``, too."""

    def enter(*_: Any) -> None:
        sys.setprofile(None)
        Mode(trace).__enter__()  # type: ignore[no-untyped-call]

    until.callback(threading.setprofile, threading.getprofile())
    threading.setprofile(enter)
