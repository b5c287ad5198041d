"""Converts a model in place, and what is added to it later."""

from __future__ import annotations

from collections.abc import Set
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from apex._core import dtypes
from apex._engine.conversion.casts import cast_parts, undo_convert
from apex._engine.conversion.plan import ModelPlan, Region
from apex._engine.conversion.state import ModelState, state_of
from apex._engine.conversion.state_dict import MasterLink
from apex._engine.conversion.subclass import set_state
from apex._torch import fsdp
from apex._torch.modules import named_tensors

if TYPE_CHECKING:
    from apex._engine.session import Session


def convert(
    model: nn.Module, plan: ModelPlan, region: Region, session: Session | None, undo: ExitStack
) -> None:
    """Converts ``model`` by ``plan``, in place; on failure, call :func:`undo_convert`.

    Parameters and buffers stay the same objects, so optimizers and tied weights keep them. Call
    ``check`` first: this function validates nothing.

    Args:
        model: A plain model.
        plan: The conversion.
        region: Runs the model's own forward.
        session: Has the exact values for ``state_dict`` and ``restore``; receives loaded ones. The
            model keeps it alive.
        undo: Receives the inverse of the tensors' casts.
    """
    if any(map(fsdp.compute_dtype, fsdp.param_groups(model))):
        plan = replace(plan, input_dtype=None)  # fully_shard casts inputs itself
    set_state(model, ModelState(plan, region, MasterLink(session)), undo)


def convert_late(model: nn.Module, params: Set[int]) -> list[tuple[Tensor, Tensor]]:
    """Casts what was added to a converted model, such as a new head; all or nothing.

    Does nothing unless the model holds one of the parameters, given by their ids. Returns the
    tensors whose dtype changed, with their values before.
    """
    state = state_of(model)
    if state is None or params.isdisjoint(map(id, named_tensors(model).values())):
        return []
    before = floating_tensors(model)
    with ExitStack() as undo:
        cast_parts(model, state, undo)
        undo.pop_all()
    return [(tensor, value) for tensor, value in before if value.dtype is not tensor.dtype]


def floating_tensors(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Returns the floating tensors of a model, each once, with their present values."""
    tensors = named_tensors(model).values()
    return [(tensor, tensor.detach()) for tensor in tensors if dtypes.is_castable(tensor)]


def set_region(model: nn.Module, region: Region) -> None:
    """Sets the region in which a converted model runs its forward."""
    state = state_of(model)
    if state is not None:
        state.region = region


def hand_over(model: nn.Module, undo: ExitStack) -> None:
    """Makes a converted model plain for another conversion; pushes the inverse to ``undo``.

    Only for plans that do not cast weights to 16 bits. Does nothing to a plain model.
    """
    state = state_of(model)
    if state is not None:
        undo_convert(model)
        undo.callback(convert, model, state.plan, state.region, state.link.session, ExitStack())
