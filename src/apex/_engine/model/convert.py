"""Converts a model in place, and restores it."""

from __future__ import annotations

from collections.abc import Mapping, Set

from torch import Tensor, nn

from apex._core import dtypes
from apex._core.rounding import exact_value
from apex._engine.model import kept_buffers, proxy_class, sharding
from apex._engine.model.lost_values import find_lost, name_lost
from apex._engine.model.module_class import (
    ConvertedModule,
    converted_class,
    plain_class,
    swap_class,
)
from apex._engine.model.plan import MasterSource, ModelPlan, Parts, Region
from apex._engine.model.state import (
    STATE,
    ModelState,
    flatten_rnns,
    module_behind,
    set_in_place,
    stash_forward,
    state_of,
)
from apex._engine.model.state_dict import MasterLink
from apex._engine.undo import Undo, all_or_nothing
from apex._torch.modules import own_tensors


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
        model: A plain model, or a proxy of one.
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
        swap_class(module, converted_class(type(module)))
        if module is not model:
            proxy_class.cover(model)
        stash_forward(module, state)
        state.apply(module, undo)
    except BaseException:
        undo_convert(model)
        raise


def convert_late(model: nn.Module, params: Set[int]) -> list[tuple[Tensor, Tensor]]:
    """Casts modules added to a converted model, such as a new head; all or nothing.

    Does nothing unless the model holds one of the parameters, given by their ids. Returns the
    tensors whose dtype changed, with their values before.
    """
    state = state_of(model)
    parts = [] if state is None else state.late_parts(model, params)
    if state is None or not parts:
        return []
    lost = find_lost(model, state.plan, parts)
    before = floating_tensors(parts)
    state.apply(model, parts=parts)
    name_lost(model, state.plan, lost)
    return [(now, value) for now, value in before if value.dtype is not now.dtype]


def floating_tensors(parts: Parts) -> list[tuple[Tensor, Tensor]]:
    """Returns the floating tensors of some modules, each once, with their present values."""
    found = {id(tensor): tensor for _, module in parts for _, tensor in own_tensors(module)}
    return [(t, t.detach()) for t in found.values() if dtypes.is_castable(t)]


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
    old_class = plain_class(type(module))
    state.link.write_back()
    with all_or_nothing() as undo:
        source, others = state.link.source, masters or {}
        for tensor in [*module.parameters(), *module.buffers()] if state.plan.casts_down else ():
            if dtypes.is_low_precision(tensor):
                own = None if source is None else source.master_of(tensor)
                exact = exact_value(tensor, [own, others.get(id(tensor))])
                set_in_place(tensor, exact, undo)
        swap_class(module, old_class)
    _forget(model, state)
    flatten_rnns(model.modules())


def undo_convert(model: nn.Module) -> None:
    """Makes a converted model plain, but leaves the dtypes of its tensors.

    Allocates no tensors, so it works out of memory.
    """
    state = state_of(model)
    if state is None:
        return
    module = module_behind(model)
    if issubclass(type(module), ConvertedModule):
        swap_class(module, plain_class(type(module)))
    _forget(model, state)


def hand_over(model: nn.Module, undo: Undo) -> None:
    """Makes a converted model plain for another conversion; pushes the inverse to ``undo``.

    Only for plans that do not cast weights to 16 bits. Does nothing to a plain model.
    """
    state = state_of(model)
    if state is not None:
        undo_convert(model)
        undo.push(convert, model, state.given, state.region, state.link.source, state.owner)


def _forget(model: nn.Module, state: ModelState) -> None:
    state.remove_hooks()
    for buffer in model.buffers():
        kept_buffers.unmark(buffer)
    module = module_behind(model)
    if module is not model:
        proxy_class.uncover(model)
    if state.inner_forward is not None:
        module.__dict__.setdefault("forward", state.inner_forward)
    del module.__dict__[STATE]
