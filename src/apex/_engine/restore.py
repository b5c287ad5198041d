"""Turns converted models and prepared optimizers back into plain ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core import dtypes, tree
from apex._core.param_groups import is_from, optimizers_in, params_of, states_in
from apex._engine.autocast.ambient import end_stale_casts
from apex._engine.conversion import casts, checks
from apex._engine.optimizer import subclass
from apex._engine.optimizer.prepared import PreparedOptimizer
from apex._torch import parameters

_FUSED_ADAM = "apex.optimizers.fused_adam"


def make_plain(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Turns converted models and prepared optimizers back into plain fp32 objects.

    The optimizers keep their state and step the models' own parameters, which get the masters'
    values. Gradients that overflowed are dropped, with a warning.
    """
    end_stale_casts()
    checks.refuse_inference_mode("amp.restore")
    old_dtypes = dtypes_of(optimizers)
    prepared_optimizers: list[PreparedOptimizer] = []
    masters: dict[int, Tensor] = {}
    for optimizer in optimizers:
        prepared = subclass.prepared_state(optimizer)
        if prepared is None:
            continue
        prepared_optimizers.append(prepared)
        prepared.update_masters_with_grads()
        prepared.drop_overflowed()
        for pair in prepared.pairs:
            masters[id(pair.model)] = pair.master
    for model in models:
        casts.restore(model, masters)
    for prepared in prepared_optimizers:
        _make_optimizer_plain(prepared)
        for user in (prepared, *models):
            prepared.masters.release(user)
    match_states(optimizers, old_dtypes)


def _make_optimizer_plain(prepared: PreparedOptimizer) -> None:
    """Gives the optimizer the model's parameters, and its own class."""
    for pair in prepared.pairs:
        if dtypes.is_low_precision(pair.model):  # its module is no longer part of the model
            pair.model.data = parameters.uncounted(pair.master)
    prepared.close()
    subclass.unprepare_class(prepared.optimizer)


def dtypes_of(optimizers: Iterable[Optimizer]) -> list[torch.dtype]:
    """Returns the dtypes of all parameters that the optimizers step, in order."""
    return [param.dtype for optimizer in optimizers for param in params_of(optimizer)]


def match_states(optimizers: Sequence[Optimizer], before: Iterable[torch.dtype]) -> None:
    """Casts optimizer state to the new dtype of its parameter, as torch's kernels require.

    Needed for parameters converted in place (O3).

    Args:
        optimizers: Optimizers whose parameters were converted, or exchanged for masters.
        before: Their :func:`dtypes_of` before that.
    """
    params: list[Tensor] = []
    for optimizer in optimizers:
        params += params_of(optimizer)
    old_dtypes = dict(zip(map(id, params), before, strict=True))
    for optimizer in optimizers:
        for part in optimizers_in(optimizer):
            # apex.optimizers keep fp32 state for 16-bit parameters. Ours declare it, NVIDIA's not.
            if getattr(part, "state_stays_fp32", False) or is_from(part, _FUSED_ADAM):
                continue
            for param, state in states_in(getattr(part, "state", {})):
                _cast_state(state, old_dtypes.get(id(param), param.dtype), param.dtype)


def _cast_state(state: dict[str, Any], old: torch.dtype, new: torch.dtype) -> None:
    if old is new:
        return
    # A state with codes also contains their scales, in fp32 for parameters of any dtype.
    if any(map(dtypes.is_code, tree.tensors(state))):
        return

    def cast(value: Tensor) -> Tensor:
        is_count = value.dim() == 0  # a step count stays exact
        if is_count or value.dtype is not old:
            return value
        return value.to(new)

    for name, value in state.items():
        state[name] = tree.map_tensors(cast, value)
