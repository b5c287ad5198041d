"""Where an operator ran: the module, the direction of the pass, and the line of user code."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import threading
import traceback
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from apex._core.user_files import is_user_file
from apex._torch.autograd import backward_id
from apex._torch.modules import modules_in, named_parameters, uncompiled

Direction = Literal["forward", "backward"]

# torch has no public names for these. Without them, backward passes have no module and no line.
_current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
_next_sequence: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)

_MAX_SITES = 2**17
"""Number of autograd nodes whose sites are kept, the latest ones. A graph seldom has more."""


@dataclass(frozen=True)
class Place:
    """Where an operator was called.

    Attributes:
        module: Qualified name of the innermost module; ``""`` for the model itself and outside it.
        inside: Whether a model was running, forward or backward.
        direction: ``"forward"`` or ``"backward"``, also where a checkpoint recomputes a forward.
        location: ``"file:line"`` of user code; in a backward pass, the line of the forward. ``""``
            if there is none.
    """

    module: str
    inside: bool
    direction: Direction
    location: str

    @property
    def source(self) -> str:
        """The line of code at ``location``; ``""`` if there is none to read."""
        file, _, line = self.location.rpartition(":")
        if not line:
            return ""
        return linecache.getline(file, int(line)).strip()

    @property
    def shown(self) -> str:
        """The location and, on a line of its own, the source; ``""`` if there is none."""
        return f"{self.location}\n{self.source}".rstrip()

    @property
    def where(self) -> str:
        """The module in words, such as ``"in body.0"``."""
        if self.module:
            return f"in {self.module.removesuffix(':')}"
        if self.inside:
            return "in the model"
        return "outside the model"


@dataclass(frozen=True)
class Finding(Place):
    """Where low precision, or a formula, went wrong, why, and what to do.

    Attributes:
        op: Operator, such as ``"aten.exp"``.
        kind: What happened: ``"inf"``, ``"nan"``, ``"scaled"``, ``"rounding"``,
            ``"cancellation"``, ``"chain"``, ``"lost update"``, ``"underflow"``, ``"frozen"``.
        dtype: Name of the dtype of the result.
        what: What happened, in a line.
        cause: The cause, in one to three words.
        why: The cause, in a sentence.
        remedies: What to do, the most likely way first.
        inputs: Ranges of the inputs, at most four.
        pattern: The formula to avoid, such as ``"exp of a large number"``; ``""`` if none is known.
        heals: Whether a dynamic loss scale backs off from it, so that training goes on.
        notes: Further facts, each a label of at most six letters and a text.
    """

    op: str
    kind: str
    dtype: str
    what: str
    cause: str
    why: str
    remedies: tuple[str, ...]
    inputs: tuple[Any, ...] = ()
    pattern: str = ""
    heals: bool = False
    notes: tuple[tuple[str, str], ...] = ()

    @property
    def remedy(self) -> str:
        """The remedies, one a line, numbered if there are several."""
        if len(self.remedies) == 1:
            return self.remedies[0]
        return "\n".join(f"{number}. {text}" for number, text in enumerate(self.remedies, 1))

    def __str__(self) -> str:
        cause = f"{self.cause}: {self.why}"
        if self.pattern:
            cause += f" This is {self.pattern}."
        parts = (
            ("at", self.shown),
            ("in", ", ".join(map(str, self.inputs))),
            ("cause", cause),
            *self.notes,
            ("remedy", self.remedy),
        )
        lines = [self.what]
        for name, text in parts:
            if text:
                indented = text.replace("\n", "\n         ")
                lines.append(f"  {name:6} {indented}")
        return "\n".join(lines)


class Site(NamedTuple):
    """The operator call that created an autograd node.

    Attributes:
        place: Where it ran.
        task: Number of the backward pass in which it ran; -1 for none.
    """

    place: Place
    task: int = -1


class _Running(NamedTuple):
    """A module that is running, its name, and the backward pass in which it was called."""

    module: nn.Module
    name: str
    task: int


@dataclass
class _ThreadState(threading.local):
    """The state of one thread.

    Attributes:
        stack: Its running modules, the innermost last.
        last_sequence: Number of the last autograd node that it created.
    """

    stack: list[_Running] = field(default_factory=list)
    last_sequence: int = -1


class Tracker:
    """Tracks which module of the given models is running, in which direction and from which line.

    In a backward pass, module and line are those whose forward created the running autograd node.
    For this, ``record_site`` has to be called at every operator.

    With several models, names are prefixed with the model's class: ``"Net:body.0"``, and
    ``"Net[1]:body.0"`` for the second model of a class. Without any, models are found as they are
    called: a model is a module with parameters that is called outside any other module. The tracker
    keeps no model alive.
    """

    def __init__(self, *models: nn.Module) -> None:
        """Collects the names."""
        # Qualified name of each module and of each parameter.
        self.names = weakref.WeakKeyDictionary[nn.Module, str]()
        self.parameters: MutableMapping[Tensor, str] = WeakIdKeyDictionary()
        # Whether the last module that was called ran under autocast. Operators cannot tell: in a
        # dispatch mode autocast is off.
        self.autocasts = False
        # Whether models are found as they are called.
        self._discovers = not models
        # The models, unwrapped, in order: a dict serves as an ordered set.
        self._models = weakref.WeakKeyDictionary[nn.Module, None]()
        for model in models:
            self._models[unwrapped(model)] = None
        self._state = _ThreadState()
        # The thread that started tracking.
        self._thread = 0
        # Sites by thread and sequence number, the oldest first.
        self._sites = OrderedDict[tuple[int, int], Site]()
        self._add_names()

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Hooks all modules inside the block; discards the recorded sites at its end."""
        self._thread = threading.get_ident()
        self._state.last_sequence = _next_sequence() - 1
        # catch_warnings would undo the filters that the script sets in the meantime.
        # Python keeps equal filters once, and a trace that ends would remove another's. A comment
        # in the pattern makes them differ.
        message = f"{_ABOUT_GLOBAL_HOOKS}(?#{id(self)})"
        warnings.filterwarnings("ignore", message=message)
        own_filter = warnings.filters[0]
        before = register_module_forward_pre_hook(self._enter_module)
        after = register_module_forward_hook(self._leave_module, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            filters: Any = warnings.filters
            if own_filter in filters:
                filters.remove(own_filter)
            self._state = _ThreadState()
            self._sites.clear()

    # -- names -----------------------------------------------------------------------------------

    @property
    def models(self) -> list[nn.Module]:
        """The models that exist, unwrapped."""
        return list(self._models)

    def _add_names(self) -> None:
        for prefix, model in prefixed(self.models):
            for name, module in model.named_modules():
                self.names.setdefault(module, prefix + name)
            for name, parameter in named_parameters(model):
                self.parameters.setdefault(parameter, prefix + name)

    # -- queries -------------------------------------------------------------------------------

    @property
    def direction(self) -> Direction:
        """``"backward"`` while autograd computes gradients, also where a checkpoint recomputes."""
        return "forward" if backward_id() == -1 else "backward"

    @property
    def may_stop(self) -> bool:
        """Whether this is the thread that started tracking, outside any backward pass."""
        return self.direction == "forward" and threading.get_ident() == self._thread

    @property
    def runs_formula(self) -> bool:
        """Whether autograd's own formula of a derivative is running, not user code."""
        return self.direction == "backward" and not line_within_backward()

    @property
    def place(self) -> Place:
        """Where the running operator was called.

        In a backward pass, the line is the forward's, unless user code itself is running (a custom
        backward, a hook, a recompute). Without a recorded forward, it is the line that started the
        backward pass.
        """
        line = line_within_backward()
        site = self.forward_site
        if site is not None:
            line = line or site.place.location
        return Place(*self.module, self.direction, line or innermost_line())

    @property
    def module(self) -> tuple[str, bool]:
        """Name of the innermost running module, and whether a model or its backward runs."""
        stack = self._state.stack
        if stack and stack[-1].task == backward_id():
            return stack[-1].name, True
        site = self.forward_site
        if site is None:
            return "", False
        return site.place.module, site.place.inside

    @property
    def running(self) -> nn.Module | None:
        """The innermost running module; None outside all, and in their backward."""
        stack = self._state.stack
        return stack[-1].module if stack else None

    # -- autograd nodes --------------------------------------------------------------------------

    def record_site(self) -> None:
        """Records the current place if the running operator has created an autograd node.

        Note [Sequence numbers]
            Autograd numbers nodes per thread and creates an operator's node just before it calls
            the operator's kernel. So the first kernel after the count changes belongs to the node
            with the last number. Nodes created in a thread of the engine are numbered in that
            thread; only a backward pass inside or after the one that created them (a reentrant
            checkpoint, a double backward) can run them.
        """
        number = _next_sequence() - 1
        if number != self._state.last_sequence:
            self._state.last_sequence = number
            site = Site(self.place, backward_id())
            self._sites[threading.get_ident(), number] = site
            if len(self._sites) > _MAX_SITES:
                self._sites.popitem(last=False)

    @property
    def accumulating(self) -> Tensor | None:
        """The tensor to whose ``grad`` autograd is adding; None while it adds to none."""
        variable: Tensor | None = getattr(_current_node(), "variable", None)
        return variable

    @property
    def forward_site(self) -> Site | None:
        """The site whose forward created the running autograd node; None if unknown."""
        node = _current_node()
        if node is None:
            return None
        if self.accumulating is not None:
            name = self.parameters.get(self.accumulating)
            if name is None:
                return None
            place = Place(owner_of(name), inside=True, direction="backward", location="")
            return Site(place)
        number = node._sequence_nr()
        site = self._sites.get((threading.get_ident(), number))
        # This pass cannot run a node that it created itself: see Note [Sequence numbers].
        if site is None or site.task == backward_id():
            site = self._sites.get((self._thread, number))
        return site

    # -- hooks -----------------------------------------------------------------------------------

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        if self._discovers and module not in self.names:
            self._discover(module)
        name = self.names.get(module)
        if name is None:  # a copy, or a replica of DataParallel
            return
        self.autocasts = torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu")
        self._state.stack.append(_Running(module, name, backward_id()))

    def _leave_module(self, module: nn.Module, *_: Any) -> None:
        stack = self._state.stack
        if stack and stack[-1].module is module:
            stack.pop()

    def _discover(self, module: nn.Module) -> None:
        """Adds a model that is called, in place of models that are parts of it."""
        model = unwrapped(module)
        if not self._state.stack and any(named_parameters(model)):
            for part in modules_in(model):
                self._models.pop(part, None)
            self._models[model] = None
            self.names.clear()
            self.parameters.clear()
        self._add_names()


# The hooks would cause this warning of torch's. A compiled model runs uncompiled in a trace.
_ABOUT_GLOBAL_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model inside ``torch.compile`` and data-parallel wrappers."""
    inner = uncompiled(model)
    if isinstance(inner, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return unwrapped(inner.module)
    return inner


def prefixed(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yields each model with the prefix of its names, which is ``""`` for a single model."""
    seen = Counter[str]()
    for model in models:
        name = type(model).__name__
        prefix = f"{name}[{seen[name]}]:" if seen[name] else f"{name}:"
        seen[name] += 1
        if len(models) == 1:
            prefix = ""
        yield prefix, model


def owner_of(parameter: str) -> str:
    """Returns the name of the module that owns the named parameter."""
    module, dot, _ = parameter.rpartition(".")
    if dot:
        return module
    model, colon, _ = parameter.rpartition(":")
    return model + colon


# -- autograd nodes by name ----------------------------------------------------------------------


def node_name() -> str:
    """Returns the running autograd node's operator: ``"Sqrt"`` for ``SqrtBackward0``.

    Returns ``""`` outside a backward pass.
    """
    node = _current_node()
    if node is None:
        return ""
    return str(node.name()).partition("Backward")[0]


# -- frames --------------------------------------------------------------------------------------

# Ends of file names: files that start a backward pass, and files of loss scalers.
_ENGINE = ("/torch/autograd/graph.py", "/torch/autograd/__init__.py")
_SCALERS = (
    "/torch/amp/grad_scaler.py",
    "/apex/_engine/scaler.py",
    "/apex/_engine/backward.py",
    "/apex/amp/scaler.py",
    "/apex/fp16_utils/loss_scaler.py",
    "/apex/fp16_utils/master_wrapper.py",
)


def innermost_line() -> str:
    """Returns ``"file:line"`` of the innermost user frame, or ``""`` if there is none."""
    return _innermost("user")[1]


def line_within_backward() -> str:
    """Returns the innermost user line of the running backward pass, such as of a hook's.

    The search ends at the frames of autograd's Python entry point, which threads of the engine do
    not have. Without a pass, it finds the innermost line of all.
    """
    kind, line = _innermost("user", "engine")
    return "" if kind == "engine" else line


def runs_in_scaler() -> bool:
    """Returns whether a loss scaler runs the operator, and not the script."""
    return _innermost("user", "scaler")[0] == "scaler"


def _innermost(*kinds: str) -> tuple[str, str]:
    """Returns the kind and the line of the innermost frame of these kinds; ``""`` if none runs."""
    for frame, number in traceback.walk_stack(inspect.currentframe()):
        code = frame.f_code
        kind = _kind(code.co_filename)
        # A dispatch mode observes the operator; the call itself is further out.
        if kind in kinds and code.co_name != "__torch_dispatch__":
            return kind, f"{code.co_filename}:{number}"
    return "", ""


@functools.cache
def _kind(filename: str) -> str:
    """Returns whose code a file is: ``"engine"``, ``"scaler"``, ``"library"`` or ``"user"``."""
    path = filename.replace(os.sep, "/")
    if path.endswith(_ENGINE):
        return "engine"
    if path.endswith(_SCALERS):
        return "scaler"
    return "user" if is_user_file(filename) else "library"
