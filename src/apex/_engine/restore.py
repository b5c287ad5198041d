"""Turns converted models and bound optimizers back into plain ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from apex._core import dtypes, tree
from apex._core.param_groups import is_from, params_of, states_in
from apex._engine import model as conversion
from apex._engine import optimizer_class
from apex._engine.binding import Binding
from apex._engine.exchange import optimizers_in
from apex._torch import parameters


def restore(models: Iterable[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Turns converted models and bound optimizers back into plain fp32 objects.

    The optimizers keep their state and step the models' own parameters, which get the masters'
    values.
    """
    models = list(models)
    conversion.refuse_inference_mode("amp.restore")
    before = dtypes_of(optimizers)
    bindings = [b for opt in optimizers if (b := optimizer_class.binding_of(opt)) is not None]
    for binding in bindings:
        binding.settle()
    known = {id(pair.model): pair.master for binding in bindings for pair in binding.pairs}
    for model in models:
        conversion.restore(model, known)
    for binding in bindings:
        _release(binding)
    for binding in bindings:
        if binding.owner is not None:
            for holder in (binding, *models):
                binding.owner.masters.release(holder)
    match_states(optimizers, before)


def _release(binding: Binding) -> None:
    """Makes the optimizer plain; the model's parameters get their masters' gradients."""
    pairs, optimizer = list(binding.pairs), binding.optimizer
    for pair in pairs:
        if dtypes.is_low_precision(pair.model):  # its module is no longer part of the model
            pair.model.grad = None
            pair.model.data = parameters.uncounted(pair.master)
        grad = pair.master.grad
        pair.model.grad = None if grad is None else grad.to(pair.model.dtype)
    binding.close()
    optimizer_class.unbind_class(optimizer)
    if binding.owner is not None:
        binding.owner.forget(binding)


def dtypes_of(optimizers: Iterable[Optimizer]) -> dict[int, torch.dtype]:
    """Returns the dtype of every parameter that the optimizers step, by ``id``."""
    return {id(p): p.dtype for optimizer in optimizers for p in params_of(optimizer)}


def match_states(optimizers: Iterable[Optimizer], before: Mapping[int, torch.dtype]) -> None:
    """Casts optimizer state to the new dtype of its parameter, as torch's kernels require.

    Needed for parameters converted in place (O3). All or nothing.
    """
    matched = [
        entry
        for optimizer in optimizers
        for each in optimizers_in(optimizer)
        for entry in _matched(each, optimizer_class.binding_of(optimizer), before)
    ]
    for state, name, value in matched:
        state[name] = value


def _matched(
    optimizer: Optimizer, binding: Binding | None, before: Mapping[int, torch.dtype]
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    # apex.optimizers keep fp32 state for 16-bit parameters. Ours declare it, NVIDIA's does not.
    declared = getattr(optimizer, "state_stays_fp32", False)
    if declared or is_from(optimizer, "apex.optimizers.fused_adam"):
        return
    # 0-d tensors are step counts, which stay exact; in LBFGS they are dot products.
    least_dim = 0 if isinstance(optimizer, LBFGS) else 1
    pairs = () if binding is None else binding.pairs
    behind = {id(pair.master): id(pair.model) for pair in pairs}
    for param, state in states_in(optimizer.state):
        old = before.get(behind.get(id(param), id(param)), param.dtype)
        # A frozen parameter's state is for the fp32 master that it gets when unfrozen.
        frozen = binding is not None and binding.is_frozen(param)
        new = torch.float32 if frozen else param.dtype
        # Beside codes of moments are their scales, in fp32 whatever the parameter's dtype.
        if old is new or any(map(dtypes.is_code, tree.tensors(state))):
            continue

        def follow(value: Tensor, old: torch.dtype = old, new: torch.dtype = new) -> Tensor:
            return value.to(new) if value.dtype is old and value.dim() >= least_dim else value

        for name, value in state.items():
            yield state, name, tree.map_tensors(follow, value)
