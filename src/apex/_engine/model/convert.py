"""Convert a model in place, and make it plain again."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from apex._core import dtypes
from apex._core.rounding import exact_value
from apex._engine.model.module_class import (
    ConvertedModule,
    converted_class,
    plain_class,
    swap_class,
)
from apex._engine.model.plan import MasterSource, ModelPlan, Region
from apex._engine.model.state import (
    STATE,
    ModelState,
    flatten_rnns,
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
    """Makes ``model`` cast as ``plan`` says, in place; on failure it is as it was.

    Parameters and buffers stay the same objects, so optimizers and tied weights keep them. Call
    ``check`` first: nothing is refused here.

    Args:
        model: A plain model.
        plan: The conversion.
        region: Runs the model's own forward.
        masters: Source of exact values for ``state_dict`` and ``restore``; receives loaded ones.
        owner: Kept alive as long as the model, and not copied with it.
        undo: Receives how to take the casts of its tensors back after this call.
    """
    state = ModelState(plan, region, MasterLink(masters), owner)
    model.__dict__[STATE] = state  # first of all: from here on it can be withdrawn
    try:
        swap_class(model, converted_class(type(model)))
        stash_forward(model, state)
        state.apply(model, undo)
    except BaseException:
        withdraw(model)
        raise


def convert_late(model: nn.Module) -> None:
    """Casts what was added to a converted model since, such as a new head; all or nothing."""
    state = state_of(model)
    if state is not None:
        state.apply(model)


def set_region(model: nn.Module, region: Region) -> None:
    """Makes a converted model run its forward in another region from now on."""
    state = state_of(model)
    if state is not None:
        state.region = region


def restore(model: nn.Module, masters: Mapping[int, Tensor] | None = None) -> None:
    """Makes ``model`` plain and fp32 again, in place.

    Parameters take their masters' exact values where those round to what the parameter holds.

    Args:
        model: A converted model.
        masters: Fp32 masters by ``id`` of their parameter, beside those that the model knows of
            (an unpickled one knows of none).

    Raises:
        ValueError: If ``model`` is not converted.
    """
    state = state_of(model)
    if state is None:
        raise ValueError(
            f"amp.restore got the model {type(model).__name__}, which amp has not prepared. Pass "
            "a model that amp.initialize returned, once."
        )
    old_class = plain_class(type(model))
    state.link.write_back()
    with all_or_nothing() as undo:
        if state.plan.casts_down:
            _to_fp32(model, state.link.source, masters or {}, undo)
        swap_class(model, old_class)
    _forget(model, state)
    flatten_rnns(model)


def withdraw(model: nn.Module) -> None:
    """Makes a converted model plain again, but leaves the dtypes of its tensors.

    Allocates nothing, so it works when memory has run out.
    """
    state = state_of(model)
    if state is None:
        return
    if isinstance(model, ConvertedModule):
        swap_class(model, plain_class(type(model)))
    _forget(model, state)


def _forget(model: nn.Module, state: ModelState) -> None:
    state.remove_hooks()
    if state.inner_forward is not None:
        model.__dict__.setdefault("forward", state.inner_forward)
    del model.__dict__[STATE]


def _to_fp32(
    model: nn.Module, source: MasterSource | None, masters: Mapping[int, Tensor], undo: Undo
) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        if dtypes.is_low_precision(tensor):
            known = [None if source is None else source.master_of(tensor), masters.get(id(tensor))]
            exact = exact_value(tensor, [value for value in known if value is not None])
            set_in_place(tensor, exact, undo)
