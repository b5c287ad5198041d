"""Turns converted models and prepared optimizers back into plain ones."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from apex._core import dtypes
from apex._core.param_groups import dtypes_of, match_states
from apex._engine.autocast.ambient import follow_sessions
from apex._engine.conversion import casts, checks
from apex._engine.conversion.state import state_of
from apex._engine.optimizer import subclass
from apex._engine.optimizer.prepared import PreparedOptimizer
from apex._torch import parameters


def make_plain(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> bool:
    """Turns converted models and prepared optimizers back into plain fp32 objects.

    The optimizers keep their state and step the models' own parameters, which get the masters'
    values. Returns whether gradients that overflowed were dropped.
    """
    follow_sessions()
    checks.refuse_inference_mode("amp.restore")
    old_dtypes = dtypes_of(optimizers)
    prepared_optimizers = [*filter(None, map(subclass.prepared_state, optimizers))]
    drops_grads = False
    for prepared in prepared_optimizers:
        prepared.create_missing_masters()  # of parameters that the script has moved to it
        prepared.update_masters_with_grads()
        if prepared.drop_overflowed():
            drops_grads = True
    sessions = {prepared.session for prepared in prepared_optimizers}
    sessions |= {state.session for state in map(state_of, models) if state is not None}
    for model in models:
        casts.restore(model)
    for prepared in prepared_optimizers:
        _make_optimizer_plain(prepared)
    match_states(optimizers, old_dtypes)
    for session in sessions:
        if not session.models:
            session.close()
    return drops_grads


def _make_optimizer_plain(prepared: PreparedOptimizer) -> None:
    """Gives the optimizer the model's parameters, and its own class."""
    for pair in prepared.pairs:
        if dtypes.is_low_precision(pair.model):  # its module is no longer part of the model
            pair.model.data = parameters.uncounted(pair.master)
    prepared.close()
    subclass.unprepare_class(prepared.optimizer)
