"""Turns converted models and bound optimizers back into plain ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core import dtypes, tree
from apex._core.param_groups import is_from, optimizers_in, params_of, states_in
from apex._engine.conversion import casts, checks
from apex._engine.optimizer import subclass
from apex._engine.optimizer.prepared import PreparedOptimizer
from apex._torch import parameters

_FUSED_ADAM = "apex.optimizers.fused_adam"


def make_plain(models: Iterable[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Turns converted models and bound optimizers back into plain fp32 objects.

    The optimizers keep their state and step the models' own parameters, which get the masters'
    values.
    """
    models = list(models)
    checks.refuse_inference_mode("amp.restore")
    before = dtypes_of(optimizers)
    prepared_optimizers = [
        b for opt in optimizers if (b := subclass.prepared_state(opt)) is not None
    ]
    for prepared in prepared_optimizers:
        prepared.update_masters_with_grads()
        prepared.drop_overflowed()
    known = {
        id(pair.model): pair.master for prepared in prepared_optimizers for pair in prepared.pairs
    }
    for model in models:
        casts.restore(model, known)
    for prepared in prepared_optimizers:
        _release(prepared)
    for prepared in prepared_optimizers:
        if prepared.session is not None:
            for holder in (prepared, *models):
                prepared.session.masters.release(holder)
    match_states(optimizers, before)


def _release(prepared: PreparedOptimizer) -> None:
    """Makes the optimizer plain; the model's parameters get their masters' gradients."""
    pairs, optimizer = list(prepared.pairs), prepared.optimizer
    for pair in pairs:
        if dtypes.is_low_precision(pair.model):  # its module is no longer part of the model
            pair.model.grad = None
            pair.model.data = parameters.uncounted(pair.master)
        grad = pair.master.grad
        pair.model.grad = None if grad is None else grad.to(pair.model.dtype)
    prepared.close()
    subclass.unprepare_class(optimizer)
    if prepared.session is not None:
        prepared.session.forget(prepared)


def dtypes_of(optimizers: Iterable[Optimizer]) -> dict[int, torch.dtype]:
    """Returns the dtype of every parameter that the optimizers step, by ``id``."""
    return {id(p): p.dtype for optimizer in optimizers for p in params_of(optimizer)}


def match_states(optimizers: Iterable[Optimizer], before: Mapping[int, torch.dtype]) -> None:
    """Casts optimizer state to the new dtype of its parameter, as torch's kernels require.

    Needed for parameters converted in place (O3).
    """
    for optimizer in optimizers:
        prepared = subclass.prepared_state(optimizer)
        models = {id(each.master): each.model for each in (prepared.pairs if prepared else ())}
        for each in optimizers_in(optimizer):
            # apex.optimizers keep fp32 state for 16-bit parameters. Ours declare it, NVIDIA's not.
            declared = getattr(each, "state_stays_fp32", False)
            for param, state in (
                () if declared or is_from(each, _FUSED_ADAM) else states_in(each.state)
            ):
                old = before.get(id(models.get(id(param), param)), param.dtype)
                # A frozen parameter's state is for the fp32 master that it gets when unfrozen.
                frozen = prepared is not None and prepared.is_frozen(param)
                _cast_state(state, old, torch.float32 if frozen else param.dtype)


def _cast_state(state: dict[str, Any], old: torch.dtype, new: torch.dtype) -> None:
    # Beside codes of moments are their scales, in fp32 whatever the parameter's dtype.
    if old is new or any(map(dtypes.is_code, tree.tensors(state))):
        return

    def cast(value: Tensor) -> Tensor:
        # 0-d tensors are step counts, which stay exact.
        return value.to(new) if value.dtype is old and value.dim() else value

    state.update({name: tree.map_tensors(cast, value) for name, value in state.items()})
