"""Converts a model in place, and restores it."""

from __future__ import annotations

from collections.abc import Mapping, Set

from torch import Tensor, nn

from apex._core import dtypes
from apex._core.rounding import exact_value
from apex._engine.model import sharding
from apex._engine.model.module_class import convert_class, plain_class, swap_class
from apex._engine.model.plan import MasterSource, ModelPlan, Region
from apex._engine.model.state import (
    STATE,
    ModelState,
    module_behind,
    set_in_place,
    stash_forward,
    state_of,
)
from apex._engine.model.state_dict import MasterLink
from apex._engine.undo import Undo, all_or_nothing


def convert(
    model: nn.Module,
    plan: ModelPlan,
    region: Region,
    masters: MasterSource | None = None,
    owner: object = None,
    undo: Undo | None = None,
) -> None:
    """Converts ``model`` by ``plan``, in place; leaves it unchanged on failure.

    Parameters and buffers stay the same objects, so optimizers and tied weights keep them. Call
    ``check`` first: this function validates nothing.

    Args:
        model: A plain model, or a proxy of one, whose module is converted.
        plan: The conversion.
        region: Runs the model's own forward.
        masters: Source of exact values for ``state_dict`` and ``restore``; receives loaded ones.
        owner: Kept alive by the model, but not copied with it.
        undo: Receives the inverse of the tensors' casts.
    """
    state = ModelState(sharding.inputs_left(model, plan), region, MasterLink(masters), owner)
    module = module_behind(model)
    module.__dict__[STATE] = state  # first, because undo_convert() needs it
    try:
        convert_class(module)
        stash_forward(module, state)
        state.apply(module, undo)
    except BaseException:
        undo_convert(model)
        raise


def convert_late(model: nn.Module, params: Set[int]) -> list[tuple[Tensor, Tensor]]:
    """Casts what was added to a converted model, such as a new head; all or nothing.

    Does nothing unless the model holds one of the parameters, given by their ids. Returns the
    tensors whose dtype changed, with their values before.
    """
    state = state_of(model)
    if state is None or params.isdisjoint(map(id, model.parameters())):
        return []
    before = floating_tensors(model)
    state.apply(model)
    return [(now, value) for now, value in before if value.dtype is not now.dtype]


def floating_tensors(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Returns the floating tensors of a model, each once, with their present values."""
    tensors = [*model.parameters(), *model.buffers()]
    return [(tensor, tensor.detach()) for tensor in tensors if dtypes.is_castable(tensor)]


def set_region(model: nn.Module, region: Region) -> None:
    """Sets the region in which a converted model runs its forward."""
    state = state_of(model)
    if state is not None:
        state.region = region


def restore(model: nn.Module, masters: Mapping[int, Tensor] | None = None) -> None:
    """Turns ``model`` back into a plain fp32 model, in place.

    A parameter takes its master's exact value if that rounds to the parameter's value.

    Args:
        model: A converted model.
        masters: Fp32 masters by ``id`` of their parameter, in addition to those that the model has
            a link to (an unpickled model has none).

    Raises:
        ValueError: If ``model`` is not converted.
    """
    state = state_of(model)
    if state is None:
        raise ValueError(
            f"amp.restore got the model {type(model).__name__}, which amp has not prepared. Pass "
            "a model returned by amp.initialize, once."
        )
    module = module_behind(model)
    state.link.write_back()
    with all_or_nothing() as undo:
        source, others = state.link.source, masters or {}
        for tensor in [*module.parameters(), *module.buffers()] if state.plan.casts_down else ():
            if dtypes.is_low_precision(tensor):
                own = None if source is None else source.master_of(tensor)
                exact = exact_value(tensor, [own, others.get(id(tensor))])
                set_in_place(tensor, exact, undo)
    undo_convert(model)
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            part.flatten_parameters()


def undo_convert(model: nn.Module) -> None:
    """Makes a converted model plain, but leaves the dtypes of its tensors.

    Allocates no tensors, so it works out of memory.
    """
    state = state_of(model)
    if state is None:
        return
    module = module_behind(model)
    plain = plain_class(type(module))
    if plain is not type(module):
        swap_class(module, plain)
    state.remove_hooks()
    if state.inner_forward is not None:
        module.__dict__.setdefault("forward", state.inner_forward)
    del module.__dict__[STATE]


def hand_over(model: nn.Module, undo: Undo) -> None:
    """Makes a converted model plain for another conversion; pushes the inverse to ``undo``.

    Only for plans that do not cast weights to 16 bits. Does nothing to a plain model.
    """
    state = state_of(model)
    if state is not None:
        undo_convert(model)
        undo.push(convert, model, state.given, state.region, state.link.source, state.owner)
