"""Casts at submodules of a prepared model that a library calls directly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from apex._core import dtypes
from apex._core.tree import Args, Call, Kwargs
from apex._engine.autocast.ambient import Casts
from apex._engine.autocast.region import Region
from apex._engine.autocast.weights import Weights
from apex._engine.conversion.state import ModelState
from apex._engine.conversion.subclass import begin_call, end_call
from apex._torch.dynamo import is_compiling

R = TypeVar("R")


class SubmoduleCalls(Region):
    """Makes a prepared model's children cast like the model when a script calls them directly.

    ``amp.initialize`` casts at the model's own forward. A LightningModule's ``training_step`` often
    calls ``self.encoder(x)`` instead. In this case, the child casts its inputs to the level's dtype
    and returns fp32. Inside the model's forward, children do not cast. If a child is a container
    without a forward (``ModuleList``), its children cast. Modules further down have no hooks.
    """

    def __init__(self, model: nn.Module, state: ModelState, *, wrapped: bool) -> None:
        """Attaches the hooks.

        Args:
            model: A prepared model.
            state: The model's state.
            wrapped: Whether DistributedDataParallel calls the model, replacing its forward by a
                training step.
        """
        self._state = state
        # Number of running calls of the model and its children; only the outermost casts.
        self._depth = 0
        # Hooks to remove at the end.
        self._handles: list[RemovableHandle] = []
        state.run_in(self)
        if wrapped:
            self._handles.append(model.register_forward_pre_hook(self._note_wrapper))
        for child in _callable_children(model):
            tensors = [*child.parameters(), *child.buffers()]
            if any(map(dtypes.is_low_precision, tensors)):
                begin = child.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)
                self._handles.append(begin)
                end = child.register_forward_hook(self._end, always_call=True)
                self._handles.append(end)

    @property
    def casts_down(self) -> bool:
        """Whether the model computes in 16 bits."""
        return self._state.plan.casts_down

    def run_traced(self, fn: Callable[..., R], args: Args, kwargs: Kwargs) -> R:
        """Runs the model's own forward, in which children do not cast, while dynamo traces it."""
        self._depth += 1
        try:
            return self._state.session.region.run_traced(fn, args, kwargs)
        finally:
            self._depth -= 1

    @contextmanager
    def casts(self, weights: Weights, args: Args, kwargs: Kwargs) -> Iterator[Casts]:
        """The block for an eager forward pass of the model, in which children do not cast."""
        self._depth += 1
        try:
            with self._state.session.region.casts(weights, args, kwargs) as casts:
                yield casts
        finally:
            self._depth -= 1

    def remove(self) -> None:
        """Removes the hooks."""
        self._state.run_in(None)
        for handle in self._handles:
            handle.remove()

    def _note_wrapper(self, module: nn.Module, args: Args) -> None:
        self._state.begin_forward(traced=is_compiling())

    def _begin(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Call:
        self._depth += 1
        if self._depth > 1:
            return args, kwargs
        return begin_call(self._state, args, kwargs, traced=is_compiling())

    def _end(self, module: nn.Module, args: Args, output: Any) -> Any:
        self._depth -= 1
        if self._depth:
            return output
        return end_call(self._state, output)


def _callable_children(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the children of ``model`` that define a forward, also those inside containers."""
    for child in model.children():
        if type(child).forward is nn.Module.forward:
            yield from _callable_children(child)
        else:
            yield child
