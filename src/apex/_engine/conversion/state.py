"""The conversion state of a model, in an attribute of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from apex._core.arguments import parameters_of, positional_names
from apex._core.tree import Args, Kwargs
from apex._engine.autocast.region import LowPrecisionRegion, Region
from apex._engine.conversion.plan import ModelPlan
from apex._engine.conversion.state_dict import MasterLink
from apex._engine.conversion.writes import Writes
from apex._pickle import rebuild
from apex._torch.ddp import active_wrapper
from apex._torch.dynamo import at_tracing

STATE = "_apex_state"
"""The attribute's name."""


@dataclass(eq=False)
class ModelState:
    """The conversion state of a model.

    Attributes:
        plan: The conversion.
        region: Runs the model's own forward.
        link: Finds the masters of the parameters.
        inner_forward: A ``forward`` that was set on the object, called in place of the class's.
        handles: Hooks to remove at the end.
        uncast: Names of the arguments of ``forward`` that are not cast, and positions of those that
            it takes by position.
        unplaced: Names of those that ``forward`` takes in ``*args`` or ``**kwargs``.
        positional: How many arguments come before ``*args``.
        writes: Finds what the model writes in 16 bits.
        threads: Identifiers of the threads that run a method of the model.
    """

    plan: ModelPlan
    region: Region
    link: MasterLink
    inner_forward: Callable[..., Any] | None = None
    handles: list[RemovableHandle] = field(default_factory=list)
    uncast: tuple[int | str, ...] = ()
    unplaced: tuple[str, ...] = ()
    positional: int = 0
    writes: Writes = field(default_factory=Writes)
    threads: set[int] = field(default_factory=set)

    def begin_forward(self, model: nn.Module, *, traced: bool = False) -> None:
        """Rounds written masters into the model, and records the active DDP wrapper."""
        session = self.link.session
        if session is None:
            return
        if not traced and self.plan.casts_down:
            session.masters.update_model(model)
            if session.masters.has_clipped and torch.is_grad_enabled():
                session.masters.move_clipped_grads()
        wrapper = active_wrapper()
        if wrapper is not None:
            session.ddp_tracker.mark_forward(wrapper, traced=traced)

    def find_uncast(self, forward: Callable[..., Any]) -> None:
        """Finds the plan's ``fp32_inputs`` in the signature of ``forward``."""
        named, parameters = self.plan.fp32_inputs, parameters_of(forward)
        by_position = positional_names(forward)
        positions = [at for at, name in enumerate(by_position) if name in named]
        self.uncast = (*named, *positions)
        self.unplaced = tuple(name for name in named if name not in parameters)
        self.positional = len(by_position)

    def check_unplaced(self, args: Args, kwargs: Kwargs) -> None:
        """Raises TypeError if ``*args`` may hold one of ``unplaced``."""
        for name in self.unplaced:
            if len(args) > self.positional and name not in kwargs:
                raise TypeError(
                    f"amp.initialize got fp32_inputs with {name!r}, but the model's forward takes "
                    f"*args, which do not tell which of them it is. Pass {name}=... by keyword."
                )

    @at_tracing
    def begin_traced_forward(self, model: nn.Module) -> None:
        """Records, while dynamo traces a forward pass, what compiled code cannot."""
        self.begin_forward(model, traced=True)

    def runs_here(self) -> bool:
        """Returns whether this thread runs a method of the model."""
        return get_ident() in self.threads

    def enter_thread(self, until: ExitStack) -> None:
        """Records that this thread runs a method of the model, until ``until`` closes."""
        thread = get_ident()
        if thread not in self.threads:
            self.threads.add(thread)
            until.callback(self.threads.discard, thread)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelState:
        shared = {"writes": Writes(), "threads": set()}
        new = memo[id(self)] = object.__new__(type(self))
        new.__dict__.update(copy.deepcopy({**self.__dict__, **shared}, memo))
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without region: no level casts both parameters and operators.

        A model that casts no parameters is pickled as a plain model, without this state.
        """
        if not self.plan.casts_down:
            return type(None), ()
        return rebuild, ("model_state", self.plan, self.link, self.inner_forward, self.handles)


def rebuild_state(plan: ModelPlan, *parts: Any) -> ModelState:
    """Rebuilds a pickled state."""
    return ModelState(plan, LowPrecisionRegion(), *parts)


def state_of(model: nn.Module) -> ModelState | None:
    """Returns the conversion state of ``model``, or ``None`` for a plain one."""
    state = model.__dict__.get(STATE)
    return state if isinstance(state, ModelState) else None


def is_converted(model: nn.Module) -> bool:
    """Returns whether ``model`` is converted."""
    return state_of(model) is not None


def set_region(model: nn.Module, region: Region) -> None:
    """Sets the region in which a converted model runs its forward."""
    state = state_of(model)
    if state is not None:
        state.region = region
