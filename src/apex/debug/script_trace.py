"""Traces a whole program whose models are not known beforehand."""

from __future__ import annotations

import bisect
import functools
import importlib
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from apex._torch.modules import has_global_hooks
from apex.debug.faults import Fault
from apex.debug.module_tracker import ModuleTracker, unwrapped
from apex.debug.overflow import OverflowTrace
from apex.debug.overflow_mode import OverflowMode
from apex.debug.provenance import Provenance

# torch's own, which the modules' hooks would cause. A compiled model runs uncompiled here.
_ABOUT_GLOBAL_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"


@dataclass(frozen=True)
class Seen:
    """What the trace of a program has seen.

    Attributes:
        first: The first fault that no dynamic loss scale heals; None without one.
        steps_before: Number of optimizer steps before it; all of them without a fault.
        certain: Whether the fault reached a gradient, the loss or a weight.
        gradients: Names of parameters that received a non-finite gradient.
        operators: Number of operators traced.
        steps: Number of optimizer steps completed.
        passes: Number of backward passes that reached a gradient.
        healed: Number of these after which a dynamic loss scale backed off.
        harmless: Number of operators whose inf and NaN reached no gradient.
        first_harmless: The first of these; None without one.
        compiled: Whether a compiled model ran uncompiled.
        seconds: Time since the first operator.
        own_seconds: Time of this that the trace took: its checks, and calls of Python.
    """

    first: Fault | None
    steps_before: int
    certain: bool
    gradients: tuple[str, ...]
    operators: int
    steps: int
    passes: int
    healed: int
    harmless: int
    first_harmless: Fault | None
    compiled: bool
    seconds: float
    own_seconds: float

    @property
    def slowdown(self) -> float:
        """How many times as long ``seconds`` are as they would have been without the trace."""
        without = self.seconds - self.own_seconds
        return self.seconds / without if without > 0.0 else 1.0


class ScriptTrace(OverflowTrace):
    """An overflow trace around a program, which finds the program's models as they are called.

    A fault is certain once it has reached a gradient, the loss or a weight, and no dynamic loss
    scale backs off from it; such overflows are counted, and are no faults. Then ``on_fault`` is
    called before the next operator outside a backward pass, and may raise.
    """

    def __init__(self, *, on_fault: Callable[[], None]) -> None:
        """Prepares a trace. If ``on_fault`` returns, the program runs on, untraced."""
        super().__init__()
        self._tracker = _DiscoveringTracker()
        self._script_mode = _ScriptMode(self._tracker, self._provenance, on_fault)

    def __enter__(self) -> ScriptTrace:
        """Starts tracing this thread, and those that the program starts with ``threading``."""
        importlib.import_module("torch._dynamo")  # now: what is compiled later runs eagerly, too
        super().__enter__()
        self._hooks.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=_ABOUT_GLOBAL_HOOKS)
        self._hooks.callback(threading.setprofile, threading.getprofile())
        threading.setprofile(self._enter_thread)
        return self

    def _enter_thread(self, *_: Any) -> None:
        sys.setprofile(None)
        _Passing(self._script_mode).__enter__()  # type: ignore[no-untyped-call]

    @property
    def first(self) -> Fault | None:
        """The first fault that no dynamic loss scale heals; None without one."""
        return self._provenance.first(healing=False)

    def seen(self) -> Seen:
        """Returns what the trace has seen so far."""
        started, origins = self._script_mode.started, self._provenance
        seconds = 0.0 if started is None else time.perf_counter() - started
        origin, harmless = origins.first_origin(healing=False), origins.harmless
        steps = self._script_mode.steps
        before = len(steps) if origin is None else bisect.bisect_left(steps, origin.time)
        first = self.first
        if first is not None and first.cause == "divergence" and not before:
            first = replace(first, cause="range")  # no learning rate has acted yet
        return Seen(
            first=first,
            steps_before=before,
            certain=origins.is_certain,
            gradients=tuple(self.gradients),
            operators=origins.time,
            steps=len(steps),
            passes=origins.passes,
            healed=len(origins.healed),
            harmless=sum(each.times for each in harmless),
            first_harmless=harmless[0].fault if harmless else None,
            compiled=self._tracker.compiled,
            seconds=seconds,
            own_seconds=self._script_mode.seconds + origins.time * _unseen_seconds(),
        )

    def _new_mode(self) -> OverflowMode:
        return self._script_mode


class _ScriptMode(OverflowMode):  # type: ignore[no-untyped-call]
    """Checks operators until a fault is certain, and measures what that costs.

    Attributes:
        steps: Operators traced until each step of an optimizer.
        seconds: Time spent in the mode, without the operators themselves.
        started: When the first operator ran.
    """

    def __init__(
        self, tracker: ModuleTracker, provenance: Provenance, on_fault: Callable[[], None]
    ) -> None:
        super().__init__(tracker, provenance)
        self.steps: list[int] = []
        self.seconds = 0.0
        self.started: float | None = None
        self._on_fault = on_fault
        self._done = False

    def leave_step(self, *_: Any) -> None:
        super().leave_step()
        self.steps.append(self._provenance.time)

    def _traced(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._done:
            return func(*args, **kwargs)
        if self._provenance.is_certain and self.tracker.may_stop:
            self._done = True
            self._on_fault()
            return func(*args, **kwargs)
        start = time.perf_counter()
        self.started = self.started or start
        try:
            return super()._traced(func, types, args, kwargs)
        finally:
            self.seconds += time.perf_counter() - start

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        start = time.perf_counter()
        try:
            return super()._run(func, args, kwargs)
        finally:
            self.seconds -= time.perf_counter() - start


class _DiscoveringTracker(ModuleTracker):
    """Tracks every model that a program calls, and keeps none alive.

    A model is a module with parameters that the program calls from outside any other. A module
    without parameters, such as a loss, belongs to the code that calls it.

    Attributes:
        compiled: Whether a model was under ``torch.compile``.
    """

    def __init__(self) -> None:
        self._found: list[weakref.ref[nn.Module]] = []
        super().__init__()
        self.names = weakref.WeakKeyDictionary()
        self.compiled = False
        self._nameless: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @property
    def models(self) -> list[nn.Module]:
        """The models that were called so far and still exist."""
        return [model for found in self._found if (model := found()) is not None]

    @property
    def parameters(self) -> dict[torch.Tensor, str]:
        """Qualified name of each parameter of these models, as they are now."""
        found, self._parameters = super().parameters, {}  # a cache would keep them alive
        return found

    def _hooks(self) -> Iterator[RemovableHandle]:
        yield register_module_forward_pre_hook(self._enter_module)
        yield register_module_forward_hook(self._leave_module, always_call=True)

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        if module not in self.names and module not in self._nameless:
            self._discover(module)
        super()._enter_module(module, inputs)

    def _discover(self, module: nn.Module) -> None:
        model = unwrapped(module)
        if not self._state.stack and next(model.parameters(), None) is not None:
            self.compiled |= any(getattr(module, name, None) is not None for name in _COMPILED)
            parts = set(model.modules())
            others = [each for each in self.models if each not in parts]
            self._found = [weakref.ref(each) for each in (*others, model)]
            self.names.clear()
        self._add_names()
        if module not in self.names:
            self._nameless.add(module)


_COMPILED = ("_orig_mod", "_compiled_call_impl")
"""What a module has that torch.compile wrapped, or that compiled itself."""


@functools.cache
def _unseen_seconds() -> float:
    """Returns what a trace adds to an operator outside the mode: calls of Python, hooks of modules.

    Measured on a small training step, whatever modes and casts the script has left on. 0 if it has
    left hooks on all modules, which may print.
    """
    if has_global_hooks():
        return 0.0
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        with torch.random.fork_rng(devices=[]):
            net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.0)
        x = torch.ones(4, 8)

        def train() -> float:
            start = time.perf_counter()
            for _ in range(20):
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
            return time.perf_counter() - start

        train()
        plain = min(train(), train())
        with ScriptTrace(on_fault=lambda: None) as trace:
            train()
            operators, seconds = trace._provenance.time, trace._script_mode.seconds
            unseen = train() - plain - (trace._script_mode.seconds - seconds)
        return max(0.0, unseen / (trace._provenance.time - operators))


class _Passing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes operators on to another thread's mode."""

    supports_higher_order_operators = True

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._mode.__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
