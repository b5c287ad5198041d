"""Tracks the running module, the direction of the pass, and the line of user code."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from apex._engine.model.plan import fp32_modules
from apex._engine.model.state import ModelState, state_of
from apex._torch.dispatcher import AUTOCAST_KEYS
from apex.debug import frames
from apex.debug.place import node_name, nodes_behind

Direction = Literal["forward", "backward"]

# torch has no public names for these. Without them, backward passes have no module and no line.
_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
_current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
_next_sequence: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)

_MAX_SITES = 2**17
"""Autograd nodes whose sites are kept, the latest; a graph seldom has more."""


@dataclass(eq=False)
class Site:
    """Where an operator was called.

    Attributes:
        module: Qualified name of the innermost module; ``""`` for the model itself and outside it.
        inside: Whether a model was running.
        location: ``"file:line"`` of user code; ``""`` if there is none.
        origin: What made the operator's result non-finite; None if nothing did.
    """

    module: str
    inside: bool
    location: str
    origin: Any = None


@dataclass
class _ThreadState(threading.local):
    """One thread's stack of running modules: each with its name and backward pass."""

    stack: list[tuple[nn.Module, str, int]] = field(default_factory=list)
    last_sequence: int = -1
    created_site: Site | None = None


class UncopiedHook:
    """A module's hook that does nothing in a copy of the module and in its file.

    Scripts copy (for an average of the weights) and save models in a traced iteration, too.
    """

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        """Calls the hook."""
        self._hook(*args)

    def __reduce__(self) -> Any:
        """Copies as a function of Python's own that takes anything and returns None."""
        return getattr, (nullcontext(), "__exit__")


def hook_forward(
    module: nn.Module, before: UncopiedHook, after: UncopiedHook, *, first: bool = False
) -> tuple[RemovableHandle, RemovableHandle]:
    """Has hooks called around each forward of a module, after an exception, too.

    With ``first``, ``before`` is called ahead of the hooks that are there. A scripted module's own
    methods refuse hooks, although its calls run them.
    """
    return (
        nn.Module.register_forward_pre_hook(module, before, prepend=first),
        nn.Module.register_forward_hook(module, after, always_call=True),
    )


class ModuleTracker:
    """Tracks which module of the given models is running, in which direction and from which line.

    In a backward pass, module and line are those whose forward created the running autograd node.
    May be queried anywhere, also from a ``TorchDispatchMode``, which calls ``record_site`` at every
    operator: lines and modules of backward passes are known from it.

    With several models, names are prefixed with the model's class: ``"Net:body.0"``, and
    ``"Net[1]:body.0"`` for the second model of a class. Shared modules and parameters go by their
    first name.

    Attributes:
        names: Qualified name of each module.
        autocast: Dtype of the ``torch.autocast`` around the last call of a model; None without one.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> with ModuleTracker(model) as tracker:
        ...     model[1].register_forward_pre_hook(lambda *_: print(tracker.module))
        ...     output = model(torch.ones(1, 2))
        <torch.utils.hooks.RemovableHandle object at ...>
        1
    """

    def __init__(self, *models: nn.Module) -> None:
        """Collects the names; tracking starts on entry."""
        self.names: MutableMapping[nn.Module, str] = {}
        self.autocast: torch.dtype | None = None
        self._models = [unwrapped(model) for model in models]
        self._parameters: dict[torch.Tensor, str] = {}
        self._add_names()
        self._state = _ThreadState()
        self._thread = 0
        self._sites: OrderedDict[tuple[int, int], tuple[int, Site]] = OrderedDict()
        self._handles: list[Any] = []

    def __enter__(self) -> ModuleTracker:
        """Registers module hooks."""
        self._thread = threading.get_ident()
        self._state.last_sequence = _next_sequence() - 1
        self._handles += self._hooks()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Removes the hooks and discards the recorded sites."""
        while self._handles:
            self._handles.pop().remove()
        self._state = _ThreadState()
        self._sites.clear()

    def _hooks(self) -> Iterator[RemovableHandle]:
        enter, leave = UncopiedHook(self._enter_module), UncopiedHook(self._leave_module)
        for module in self.names:
            yield from hook_forward(module, enter, leave, first=True)

    # -- names -----------------------------------------------------------------------------------

    @property
    def models(self) -> list[nn.Module]:
        """The models, unwrapped."""
        return self._models

    @property
    def parameters(self) -> dict[torch.Tensor, str]:
        """Qualified name of each parameter."""
        if not self._parameters:
            for prefix, model in _prefixed(self.models):
                for name, parameter in model.named_parameters():
                    self._parameters.setdefault(parameter, prefix + name)
        return self._parameters

    def _add_names(self) -> None:
        for prefix, model in _prefixed(self.models):
            for name, module in model.named_modules():
                self.names.setdefault(module, prefix + name)

    def prepared(self) -> list[tuple[nn.Module, ModelState]]:
        """Returns the models, and modules inside them, that amp has prepared."""
        parts = (part for model in self.models for part in model.modules())
        return [(part, state) for part in parts if (state := state_of(part)) is not None]

    def in_fp32(self, name: str) -> bool:
        """Returns whether amp keeps a module in fp32, or its own parameters are all in fp32."""
        found = {each for each, known in self.names.items() if known == name}
        dtypes = {p.dtype for module in found for p in module.parameters(recurse=False)}
        kept = (fp32_modules(part, state.plan) for part, state in self.prepared())
        return dtypes == {torch.float32} or any(found & each for each in kept)

    # -- queries -------------------------------------------------------------------------------

    @property
    def direction(self) -> Direction:
        """``"backward"`` while autograd computes gradients; recomputed checkpoints are forward."""
        task = _graph_task()
        if task == -1 or self._running(task) is not None:
            return "forward"
        # A recompute enables gradients; autograd's own formulas run without them.
        recompute = torch.is_grad_enabled() and frames.within_backward()[1]
        return "forward" if recompute else "backward"

    @property
    def backward(self) -> int:
        """Number of the running backward pass; -1 outside any."""
        return _graph_task()

    @property
    def may_stop(self) -> bool:
        """Whether this is the thread that started tracking, outside any backward pass."""
        return _graph_task() == -1 and threading.get_ident() == self._thread

    @property
    def runs_formula(self) -> bool:
        """Whether autograd's own formula of a derivative is running, not user code."""
        return self.direction == "backward" and not frames.within_backward()[0]

    @property
    def node(self) -> str:
        """Operator of the running autograd node, such as ``"Sqrt"``; ``""`` outside any."""
        node = _current_node()
        return "" if node is None else node_name(node)

    def nodes_behind(self) -> tuple[str, ...]:
        """Returns the operators behind the running autograd node, the nearest first."""
        return () if _current_node() is None else nodes_behind(_current_node())[1:]

    @property
    def module(self) -> str:
        """Qualified name of the innermost running module; ``""`` for the model and outside it."""
        return self._current_module()[0]

    @property
    def inside(self) -> bool:
        """Whether a model is running, or its part of the backward pass."""
        return self._current_module()[1]

    def location(self) -> str:
        """Returns ``"file:line"`` of the innermost user code, or ``""`` if there is none.

        In a backward pass this is the line of the forward, unless user code itself is running (a
        custom backward, a hook, a recompute). Without a recorded forward, it is the line that
        started the backward pass.
        """
        if _graph_task() == -1:
            return frames.innermost_line()
        line = frames.within_backward()[0]
        if line:
            return line
        site = self.forward_site
        return (site.location if site is not None else "") or frames.innermost_line()

    def site(self) -> Site:
        """Returns the current module and line."""
        return Site(*self._current_module(), self.location())

    def _current_module(self) -> tuple[str, bool]:
        task = _graph_task()
        name = self._running(task)
        if name is not None:
            return name, True
        site = None if task == -1 else self.forward_site
        return ("", False) if site is None else (site.module, site.inside)

    def _running(self, task: int) -> str | None:
        """Returns the name of the innermost module if it was called in backward pass ``task``."""
        stack = self._state.stack
        return stack[-1][1] if stack and stack[-1][2] == task else None

    # -- autograd nodes --------------------------------------------------------------------------

    def record_site(self) -> None:
        """Records the current site if the running operator has created an autograd node.

        Note [Sequence numbers]
            Autograd numbers nodes per thread and creates an operator's node just before it calls
            the operator's kernel. So the first kernel after the count changes belongs to the node
            with the last number. Nodes created in a thread of the engine are numbered in that
            thread; only a backward pass inside or after the one that created them (a reentrant
            checkpoint, a double backward) can run them.
        """
        number = _next_sequence() - 1
        self._state.created_site = None
        if number != self._state.last_sequence:
            self._state.last_sequence = number
            self._state.created_site = site = self.site()
            self._sites[threading.get_ident(), number] = _graph_task(), site
            if len(self._sites) > _MAX_SITES:
                self._sites.popitem(last=False)

    @property
    def created_site(self) -> Site | None:
        """The site of the autograd node that the last operator created; None if it created none.

        In that node's backward, ``forward_site`` returns the same object.
        """
        return self._state.created_site

    @property
    def accumulating(self) -> torch.Tensor | None:
        """The tensor to whose ``grad`` autograd is adding; None while it adds to none."""
        variable: torch.Tensor | None = getattr(_current_node(), "variable", None)
        return variable

    @property
    def forward_site(self) -> Site | None:
        """The site whose forward created the running autograd node; None if unknown."""
        node = _current_node()
        if node is None:
            return None
        if self.accumulating is not None:
            name = self.parameters.get(self.accumulating)
            return None if name is None else Site(owner_of(name), True, "")
        number, thread = node._sequence_nr(), threading.get_ident()
        task, site = self._sites.get((thread, number), (-1, None))
        if site is not None and (thread == self._thread or task != _graph_task()):
            return site
        return self._sites.get((self._thread, number), (-1, None))[1]

    # -- hooks -----------------------------------------------------------------------------------

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        active = active_autocast()
        if active is not None or not self._state.stack:  # accelerate enters it inside the model
            self.autocast = None if active is None else active[1]
        name = self.names.get(module)
        if name is not None:  # a replica of DataParallel has its original's hooks, and no name
            self._state.stack.append((module, name, _graph_task()))

    def _leave_module(self, module: nn.Module, *_: Any) -> None:
        stack = self._state.stack
        if stack and stack[-1][0] is module:
            stack.pop()


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model inside ``torch.compile`` and data-parallel wrappers."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        inner = getattr(model, "_orig_mod", model.module if isinstance(model, wrappers) else None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def place_in_words(module: str, *, inside: bool) -> str:
    """Returns where an operator ran: in a module, or in or outside the model itself."""
    if module:
        return f"in {module}"
    return "in the model" if inside else "outside the model"


def _prefixed(models: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    if len(models) == 1:
        return [("", models[0])]
    seen: dict[str, int] = {}
    result = []
    for model in models:
        name = type(model).__name__
        count = seen[name] = seen.get(name, -1) + 1
        result.append((f"{name}[{count}]:" if count else f"{name}:", model))
    return result


def active_autocast() -> tuple[str, torch.dtype] | None:
    """Returns device type and dtype of an active ``torch.autocast``; None without one."""
    on = (device for device in AUTOCAST_KEYS if torch.is_autocast_enabled(device))
    return next(((device, torch.get_autocast_dtype(device)) for device in on), None)


def owner_of(parameter: str) -> str:
    """Returns the name of the module that owns the named parameter."""
    own = parameter.rpartition(":")[2].rpartition(".")[2]
    return parameter.removesuffix(own).removesuffix(".")
