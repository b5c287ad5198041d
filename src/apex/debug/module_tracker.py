"""Where the program is now: the module that runs, its direction, and the line of user code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from apex.debug import frames

Direction = Literal["forward", "backward"]

# torch has no public names for these. Without them a backward pass has no module and no line.
_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
_current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
_next_sequence: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)


class Site(NamedTuple):
    """Where an operator was called.

    Attributes:
        module: Qualified name of the innermost module; ``""`` for the model itself and outside.
        inside: Whether a model was running.
        location: ``"file:line"`` of user code; ``""`` if there is none.
    """

    module: str
    inside: bool
    location: str


@dataclass
class _Here(threading.local):
    """What one thread is in: modules with the backward pass that they were called in."""

    stack: list[tuple[nn.Module, str, int]] = field(default_factory=list)
    recorded: int = -1
    made: Site | None = None


class Whereabouts:
    """Says which module of some models runs now, forward or backward, and from which line.

    In a backward pass it is the module and the line whose forward made the autograd node that runs
    now. Ask from a ``TorchDispatchMode`` that is entered inside, or from anywhere else.

    With several models each name starts with the class of its model: ``"Net:body.0"``, in a second
    one of that class ``"Net[1]:body.0"``. Shared modules and parameters are known by their first
    name.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> with Whereabouts(model) as here:
        ...     model[1].register_forward_pre_hook(lambda *_: print(here.module))
        ...     output = model(torch.ones(1, 2))
        <torch.utils.hooks.RemovableHandle object at ...>
        1
    """

    def __init__(self, *models: nn.Module) -> None:
        """Learns the names; watches nothing yet."""
        self.names: dict[nn.Module, str] = {}
        self.parameters: dict[torch.Tensor, str] = {}
        for prefix, model in _prefixed([unwrapped(model) for model in models]):
            for name, module in model.named_modules():
                self.names.setdefault(module, prefix + name)
            for name, parameter in model.named_parameters():
                self.parameters.setdefault(parameter, prefix + name)
        self._here = _Here()
        self._thread = 0
        self._sites: dict[tuple[int, int], tuple[int, Site]] = {}
        self._handles: list[Any] = []
        self.recorder = _Recorder(self)

    def __enter__(self) -> Whereabouts:
        """Attaches hooks to the modules, and a dispatch mode that remembers forward lines."""
        self.attach()
        self.recorder.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Takes both away and forgets the lines."""
        self.recorder.__exit__(*exc_info)  # type: ignore[no-untyped-call]
        self.detach()

    def attach(self) -> None:
        """Attaches the hooks alone, for callers that enter ``recorder`` themselves."""
        self._thread = threading.get_ident()
        self._here.recorded = _next_sequence() - 1
        for module in self.names:
            self._handles += [
                module.register_forward_pre_hook(self._enter_module, prepend=True),
                module.register_forward_hook(self._leave_module, always_call=True),
            ]

    def detach(self) -> None:
        """Removes the hooks and forgets the lines."""
        while self._handles:
            self._handles.pop().remove()
        self._here = _Here()
        self._sites.clear()

    # -- questions -----------------------------------------------------------------------------

    @property
    def direction(self) -> Direction:
        """``"backward"`` while autograd computes gradients; a checkpoint's recompute is forward."""
        task = _graph_task()
        if task == -1 or self._running(task) is not None:
            return "forward"
        # A recompute turns gradients on, autograd's own formulas run without them.
        recompute = torch.is_grad_enabled() and frames.within_backward()[1]
        return "forward" if recompute else "backward"

    @property
    def module(self) -> str:
        """Qualified name of the innermost module running now; ``""`` for the model and outside."""
        return self._place()[0]

    @property
    def inside(self) -> bool:
        """Whether a model is running now, or its part of the backward pass."""
        return self._place()[1]

    def location(self) -> str:
        """Returns ``"file:line"`` of the innermost user code, ``""`` if there is none.

        In a backward pass the line of the forward, unless user code runs there itself (a custom
        backward, a hook, a recompute); the line that began the pass where there is no forward.
        """
        if _graph_task() == -1:
            return frames.innermost_line()
        line = frames.within_backward()[0]
        if line:
            return line
        site = self._site()
        return (site.location if site is not None else "") or frames.innermost_line()

    def site(self) -> Site:
        """Returns module and line together."""
        return Site(*self._place(), self.location())

    def _place(self) -> tuple[str, bool]:
        task = _graph_task()
        name = self._running(task)
        if name is not None:
            return name, True
        site = None if task == -1 else self._site()
        return ("", False) if site is None else site[:2]

    def _running(self, task: int) -> str | None:
        """Returns the name of the module called last, if that was in this backward pass."""
        stack = self._here.stack
        return stack[-1][1] if stack and stack[-1][2] == task else None

    # -- what backward passes need -------------------------------------------------------------

    def record(self) -> None:
        """Remembers the line for the autograd node that the present operator has made, if any.

        Note [Sequence numbers]
            Autograd numbers its nodes in each thread, and makes an operator's node just before it
            calls the operator's kernel. So the first kernel after the count has moved belongs to
            the node of the last number. Nodes made in a thread of the engine have numbers of that
            thread; only a backward pass inside or after the one that made them (a reentrant
            checkpoint, a double backward) can run them.
        """
        number = _next_sequence() - 1
        self._here.made = None
        if number != self._here.recorded:
            self._here.recorded = number
            self._here.made = site = self.site()
            self._sites[threading.get_ident(), number] = _graph_task(), site

    @property
    def node_made(self) -> Site | None:
        """The place kept for the autograd node that the last operator made; None if it made none.

        The same object as ``node_running`` in that node's backward.
        """
        return self._here.made

    @property
    def node_running(self) -> Site | None:
        """The place of the forward whose autograd node runs now, if it was seen."""
        return self._site()

    @property
    def accumulates(self) -> bool:
        """Whether autograd is adding to the ``grad`` of a tensor now."""
        return getattr(_current_node(), "variable", None) is not None

    @property
    def parameter(self) -> str:
        """Qualified name of the parameter whose ``grad`` autograd is adding to; else ``""``."""
        variable = getattr(_current_node(), "variable", None)
        return "" if variable is None else self.parameters.get(variable, "")

    def _site(self) -> Site | None:
        node = _current_node()
        if node is None:
            return None
        variable = getattr(node, "variable", None)
        if variable is not None:
            name = self.parameters.get(variable)
            return None if name is None else Site(_owner(name), True, "")
        number, thread = node._sequence_nr(), threading.get_ident()
        task, site = self._sites.get((thread, number), (-1, None))
        if site is not None and (thread == self._thread or task != _graph_task()):
            return site
        return self._sites.get((self._thread, number), (-1, None))[1]

    # -- hooks -----------------------------------------------------------------------------------

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        self._here.stack.append((module, self.names[module], _graph_task()))

    def _leave_module(self, module: nn.Module, *_: Any) -> None:
        stack = self._here.stack
        if stack and stack[-1][0] is module:
            stack.pop()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, here: Whereabouts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._here = here

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._here.record()
        return func(*args, **(kwargs or {}))


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model inside ``torch.compile`` and data-parallel wrappers."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        inner = getattr(model, "_orig_mod", model.module if isinstance(model, wrappers) else None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


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


def _owner(parameter: str) -> str:
    """Returns the name of the module that holds a parameter of this name."""
    own = parameter.rpartition(":")[2].rpartition(".")[2]
    return parameter.removesuffix(own).removesuffix(".")
