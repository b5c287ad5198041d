"""Casts a model's tensors by its plan, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core import dtypes
from apex._core.mixins import plain_class, swap_class
from apex._core.param_groups import is_trained
from apex._core.rounding import exact_value
from apex._core.undo import Undo
from apex._engine import master_table
from apex._engine.conversion.plan import planned_dtypes
from apex._engine.conversion.state import ModelState
from apex._engine.masters import MasterPair
from apex._engine.session import STATE, Session
from apex._engine.wrappers import fsdp
from apex._engine.wrappers.ddp import wrappers
from apex._torch.modules import flatten_rnns, named_tensors, tensor_ids
from apex._torch.parameters import set_in_place


def cast_parts(model: nn.Module, state: ModelState, undo: ExitStack) -> None:
    """Casts parameters and buffers and attaches the hooks; ``undo`` receives the inverse of casts.

    May be called again: casts what was added to the model.
    """
    plan = state.plan
    for _, tensor, dtype in planned_dtypes(model, plan):
        if tensor.dtype is not dtype and dtypes.is_castable(tensor):
            cast = tensor.detach().to(dtype)
            set_in_place(tensor, cast, undo)
    flatten_rnns(model)
    state.attach()


def make_masters(
    session: Session,
    model: nn.Module,
    before: Sequence[tuple[Tensor, Tensor]],
    optimizers: Sequence[Optimizer],
) -> None:
    """Makes the masters of a model's parameters from their values before conversion.

    Parameters that are trained, or frozen with state in an optimizer, get one. Keeps the values of
    buffers, and with the session's ``keep_fp32`` also of other rounded parameters.

    Args:
        session: Gets the masters.
        model: A converted model.
        before: Tensors of the model with their values before conversion.
        optimizers: The optimizers that train the model.
    """
    session.observer.converted(model, before)
    has_masters = bool(optimizers) and session.policy.master_weights
    with_state: set[int] = set()
    if has_masters:
        for optimizer in optimizers:
            with_state.update(map(id, optimizer.state))
    made: list[MasterPair] = []
    for tensor, exact in before:
        if not dtypes.is_low_precision(tensor):
            continue
        param = tensor if isinstance(tensor, nn.Parameter) else None
        has_state = id(tensor) in with_state
        if param is not None and has_masters and (has_state or is_trained(param)):
            made.append(master_table.create(param, exact))
        elif exact.dtype is not tensor.dtype and (session.keep_fp32 or param is None):
            master_table.exact[tensor] = exact.float()
    if made:
        vars(model)[STATE].find_pairs()  # which keeps them alive


def convert_late(optimizer: Optimizer, params: Iterable[Tensor]) -> None:
    """Casts modules that were added to models, such as a new head; in each model all or nothing.

    Only in models that hold any of an optimizer's parameters.
    """
    unknown = {id(param) for param in params if master_table.pair_of(param) is None}
    if not unknown:
        return
    for session in Session.live:  # another call may have prepared the model
        for model in session.models:
            if unknown.isdisjoint(tensor_ids([model])):
                continue
            before = floating_tensors(model)
            with Undo() as undo:
                cast_parts(model, vars(model)[STATE], undo)
                undo.pop_all()  # nothing failed: the casts stay
            make_masters(session, model, before, [optimizer])


def floating_tensors(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Returns the floating tensors of a model, each once, with their present values."""
    tensors = named_tensors(model).values()
    return [(tensor, tensor.detach()) for tensor in tensors if dtypes.is_castable(tensor)]


# -- the way back --------------------------------------------------------------------------------


def restore(model: nn.Module) -> None:
    """Turns a converted model back into a plain fp32 model, in place.

    A parameter takes its master's exact value if that rounds to the parameter's value.
    """
    state: ModelState = vars(model)[STATE]
    if state.plan.casts_down:
        with Undo() as undo:
            for tensor in named_tensors(model).values():
                if not dtypes.is_low_precision(tensor):
                    continue
                value = exact_value(tensor, master_table.exact_value(tensor))
                set_in_place(tensor, value, undo)
            undo.pop_all()  # nothing failed: the values stay
    undo_convert(model)
    flatten_rnns(model)


def undo_convert(model: nn.Module) -> None:
    """Makes a converted model plain, but leaves the dtypes of its tensors.

    Allocates no tensors, so it works out of memory.
    """
    state: ModelState = model.__dict__.pop(STATE)
    tensors = [*named_tensors(model).values()]
    for tensor in tensors:
        if not dtypes.is_low_precision(tensor):  # or an earlier call has cast it
            master_table.exact.pop(tensor, None)
    swap_class(model, plain_class(type(model)))
    state.detach()
    if state.inner_forward is not None:
        model.__dict__.setdefault("forward", state.inner_forward)
    wrappers.drop(tensors)
    fsdp.drop(model)
