"""Turns plain models and optimizers into those of a session."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from torch import nn
from torch.optim import Optimizer

from apex._core.param_groups import dtypes_of, match_states, params_of
from apex._engine.autocast.region import AutocastRegion
from apex._engine.conversion import casts
from apex._engine.conversion.plan import ModelPlan
from apex._engine.conversion.state import ModelState
from apex._engine.conversion.subclass import hand_over, set_state
from apex._engine.optimizer import unprepared
from apex._engine.optimizer.subclass import prepare_optimizer
from apex._engine.passes import hook_pairs
from apex._engine.session import Session
from apex._torch import fsdp
from apex._torch.modules import tensor_ids


def prepare(
    session: Session,
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    plan: ModelPlan,
    undo: ExitStack,
) -> None:
    """Converts models and prepares optimizers; ``undo`` receives the inverse of each step.

    An inverse allocates no device memory: it may run because memory has run out.

    Args:
        session: A session that has not begun.
        models: Models checked by :func:`apex._engine.conversion.checks.check`.
        optimizers: Optimizers that are not prepared yet.
        plan: The conversion.
        undo: Receives the inverse.
    """
    old_dtypes = dtypes_of(optimizers)
    for model in models:
        hand_over(model, undo)
    for model in models:
        before = casts.floating_tensors(model)
        undo.callback(casts.undo_convert, model)
        own_plan = plan.without_calls() if fsdp.casts(model) else plan
        state = ModelState(model, own_plan, session)
        set_state(model, state, undo)
        casts.make_masters(session, model, before, optimizers)
        if not _has_forward(model):  # no hook of its output will run
            hook_pairs(state.pairs)
    held = tensor_ids(models)
    for optimizer in optimizers:
        others = [param for param in params_of(optimizer) if id(param) not in held]
        casts.convert_late(optimizer, others)  # heads of models that earlier calls have prepared
        prepare_optimizer(session, optimizer, undo)
    undo.callback(session.close)
    begin(session, _used_by_script(models, optimizers))
    session.add_models(models)
    match_states(optimizers, old_dtypes)


def begin(session: Session, used_by_script: bool) -> None:
    """Begins a session: its op casts in this thread, and what concerns other optimizers.

    If the script itself uses weights, our kernels cast them all: torch's share casts only in
    forward passes of models.
    """
    session.begin_casts()
    if used_by_script and isinstance(session.region, AutocastRegion):
        session.region.cast_all()
    if session.follows_other_steps:
        unprepared.hooks.add(session)


def _used_by_script(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> bool:
    """Returns whether optimizers train a matrix that is used in no forward pass of the models."""
    held = tensor_ids(filter(_has_forward, models))
    for optimizer in optimizers:
        for param in params_of(optimizer):
            if param.dim() > 1 and id(param) not in held:
                return True
    return False


def _has_forward(model: nn.Module) -> bool:
    """Returns whether scripts call the model itself; they call the parts of a ModuleList."""
    return type(model).forward is not nn.Module.forward
