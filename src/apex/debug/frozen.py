"""Counts updates lost to rounding: weights that a step leaves unchanged."""

from __future__ import annotations

import copy
import functools
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex._core import finite, tree
from apex._core.param_groups import params_of, states_in
from apex._engine.optimizer.optimizer_class import ATTRIBUTE, binding_of, own_class
from apex._torch import dtensor
from apex._torch.grad_scaler import holds_unscaled
from apex.debug.arguments import check_scaler, inner

WIDER = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
}
"""The dtype in which the intended update is computed, by the weight's dtype."""

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass(eq=False)
class FrozenUpdates:
    """Counts of one optimizer step; filled in when the block around the step ends.

    Attributes:
        wanted: Number of weights whose intended update was not zero.
        frozen: How many of these kept their value.
    """

    wanted: int = 0
    frozen: int = 0

    @property
    def share(self) -> float:
        """``frozen / wanted``; 0 if no weight was to move."""
        return self.frozen / self.wanted if self.wanted else 0.0


@contextmanager
def frozen_updates(optimizer: Any, *, scaler: Any = None) -> Iterator[FrozenUpdates]:
    """Counts the weights that the step inside the block should have moved but did not.

    A copy of the optimizer computes the intended update from the same weights, gradients and state
    in a wider dtype (fp32 for 16-bit weights, fp64 for fp32 weights). If that update is not zero
    but the weight stays the same, rounding has lost it, as for an Adam step of 1e-3 on a bf16
    weight of 1. The counted weights are those that the optimizer steps: fp32 masters where they
    exist. A step with a non-finite gradient counts nothing.

    Costs a copy of weights and state, an additional step, and host syncs: use it for single steps.
    Of a sharded model, every rank counts its own shards, and every rank must use it.

    Args:
        optimizer: An optimizer that steps without a closure, prepared by amp or plain.
        scaler: The ``torch.amp.GradScaler`` by whose ``step`` a plain optimizer steps in the block.

    Raises:
        TypeError: If ``scaler`` is not a ``GradScaler``.
        ValueError: If the optimizer's step needs a closure.

    Example:
        >>> import torch
        >>> from apex.debug import frozen_updates
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 0.001], dtype=torch.bfloat16))
        >>> optimizer = torch.optim.SGD([weight], lr=1e-3)
        >>> weight.grad = torch.ones_like(weight)
        >>> with frozen_updates(optimizer) as updates:
        ...     optimizer.step()
        >>> updates.frozen, updates.wanted
        (1, 2)
    """
    check_scaler("frozen_updates", scaler)
    own = inner(optimizer)
    binding = binding_of(own)
    kind = own_class(type(own))
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"amp.debug.frozen_updates got {kind.__name__}, whose step needs a closure: its update "
            "depends on losses that only the closure can compute. Pass an optimizer that steps "
            "without a closure."
        )
    if binding is not None:
        binding.settle()
    updates = FrozenUpdates()
    params = [param for param in params_of(own) if param.grad is not None]
    if not _finite(params_of(own)):
        yield updates
        return
    before = [param.detach().clone() for param in params]
    unscaled = scaler is None or any(holds_unscaled(scaler, each) for each in (optimizer, own))
    wide = wanted_values(own, 1.0 if unscaled else scaler.get_scale())
    yield updates
    for param, old in zip(params, before, strict=True):
        moves = (wide[param] != old.to(wide[param].dtype)) & torch.isfinite(wide[param])
        stays = moves & (param.detach() == old)
        updates.wanted += int(moves.count_nonzero())  # sync: a diagnosis on request
        updates.frozen += int(stays.count_nonzero())  # sync: a diagnosis on request


def wanted_values(optimizer: Optimizer, scale: float = 1.0) -> dict[Tensor, Tensor]:
    """Returns, by parameter, the values after a step in a wider dtype; changes nothing.

    Parameters without a gradient are omitted. ``scale`` is the factor that the gradients carry.
    """
    wide = {param: _widened(param, scale) for param in params_of(optimizer)}
    memo = {id(param): wider for param, wider in wide.items()}
    shadow = _shadow(optimizer, memo)
    shadow.step()
    return {param: wider.detach() for param, wider in wide.items() if param.grad is not None}


def _shadow(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Returns a plain copy of the optimizer with the parameters in ``memo``."""
    kind = own_class(type(optimizer))
    # An LR scheduler's wrapper of `step`, and hooks, would have side effects.
    own = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in (ATTRIBUTE, "step", "grad_scale", "found_inf", *_HOOKS)
    }
    shadow = object.__new__(kind)
    shadow.__dict__.update(copy.deepcopy(own, memo))
    shadow.__dict__.update({name: OrderedDict() for name in _HOOKS})
    for param, state in states_in(shadow.state):
        match = functools.partial(_match_dtype, dtype=param.dtype)
        for name, value in state.items():
            state[name] = tree.map_tensors(match, value)
    return shadow


def _match_dtype(value: Tensor, *, dtype: torch.dtype) -> Tensor:
    # 0-d tensors are step counts, whose dtype the kernels require.
    narrower = value.dim() > 0 and value.dtype in WIDER and value.dtype.itemsize < dtype.itemsize
    return value.to(dtype) if narrower else value


def _widened(param: Tensor, scale: float) -> Tensor:
    dtype = WIDER.get(param.dtype, param.dtype)
    if param.device.type == "mps" and dtype is torch.float64:  # not supported there
        dtype = torch.float32
    wide = torch.nn.Parameter(param.detach().to(dtype, copy=True))
    wide.requires_grad_(param.requires_grad)
    if param.grad is not None:
        wide.grad = param.grad.detach().to(dtype, copy=True) / scale
    return wide


def _finite(params: Sequence[Tensor]) -> bool:
    """Returns whether all gradients are finite, those of other ranks' shards included."""
    grads = [dtensor.local(param.grad) for param in params if param.grad is not None]
    dense = map(finite.summed_values, grads)
    bad = not all(bool(torch.isfinite(grad).all()) for grad in dense)  # sync: a diagnosis
    found = torch.tensor(bad, dtype=torch.float32)
    # The copy's step may communicate, and a rank whose shards are finite skips with the others.
    dtensor.all_reduce_(found, dtensor.groups(params), "MAX")
    return not found  # sync: as above
