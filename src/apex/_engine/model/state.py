"""What a converted model carries, in one attribute of the object."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from apex._engine.model.plan import MasterSource, ModelPlan, Region
from apex._torch.ddp import active_wrapper
from apex._torch.dynamo import at_tracing

STATE = "_apex_state"


@dataclass(eq=False)
class ModelState:
    """What a converted model carries in its ``__dict__``.

    Attributes:
        plan: The dtypes.
        region: Runs the model's own forward.
        masters: Source of exact values; stays behind in copies.
        owner: Kept alive with the model; stays behind in copies.
        inner_forward: A ``forward`` that the user had set on the object, run inside.
        handles: Hooks to remove at the end.
        loading: The state dict being loaded and the model's prefix in it.
        origin: In a deep copy, the original's source of exact values: it knows the copy's masters,
            too, where an optimizer was copied along.
    """

    plan: ModelPlan
    region: Region
    masters: MasterSource | None = None
    owner: object = None
    inner_forward: Callable[..., Any] | None = None
    handles: list[RemovableHandle] = field(default_factory=list)
    loading: tuple[dict[str, Any], str] | None = None
    origin: weakref.ref[MasterSource] | None = None

    @property
    def source(self) -> MasterSource | None:
        """Who knows the masters of this model's parameters, if there are any."""
        return self.masters if self.origin is None else self.origin()

    def note_wrapper(self, *, traced: bool = False) -> None:
        """Tells the source of masters which DistributedDataParallel the forward pass runs under."""
        wrapper = active_wrapper()
        if wrapper is not None and (source := self.source) is not None:
            source.runs_under(wrapper, traced=traced)

    @at_tracing
    def note_wrapper_of_trace(self) -> None:
        """Tells it where the forward pass is traced: the code made from it cannot."""
        self.note_wrapper(traced=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelState:
        """Copies what pickles, and keeps in touch with the source of the masters."""
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        source = self.source
        new.origin = None if source is None else weakref.ref(source)
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what belongs to the original alone: its optimizer, masters and session."""
        left = ("masters", "owner", "loading", "origin")
        return {**self.__dict__, **dict.fromkeys(left)}


def stash_forward(model: nn.Module, state: ModelState) -> None:
    """Moves a ``forward`` set on the object out of the way of the class's."""
    own = model.__dict__.pop("forward", None)
    if own is not None:
        state.inner_forward = own


def state_of(model: nn.Module) -> ModelState | None:
    """Returns the conversion state of ``model``; ``None`` for a plain one."""
    state = model.__dict__.get(STATE)
    return state if isinstance(state, ModelState) else None


def is_converted(model: nn.Module) -> bool:
    """Returns whether ``model`` is converted."""
    return state_of(model) is not None


def owner_of(model: nn.Module) -> object | None:
    """Returns the owner that ``convert`` was given; ``None`` for a plain model and for copies."""
    state = state_of(model)
    return None if state is None else state.owner
