"""Updates that rounding swallowed: weights that did not move though their update was not zero."""

from __future__ import annotations

import copy
import functools
import inspect
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apex._core import finite, tree
from apex._engine.optimizer.optimizer_class import ATTRIBUTE, binding_of, own_class
from apex.amp.optimizers import unwrap

WIDER = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
}
"""The dtype in which the update that the optimizer wanted is computed, by the weight's dtype."""

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class FrozenUpdates:
    """What one optimizer step left unmoved; filled when the block around the step ends.

    Attributes:
        wanted: Weights whose update was not zero.
        frozen: Of these, weights that hold the same value after the step.
    """

    def __init__(self) -> None:
        """Starts at none."""
        self.wanted = 0
        self.frozen = 0

    @property
    def share(self) -> float:
        """``frozen / wanted``; 0 where no update was wanted."""
        return self.frozen / self.wanted if self.wanted else 0.0


@contextmanager
def frozen_updates(optimizer: Any) -> Iterator[FrozenUpdates]:
    """Counts the weights that the step inside the block should have moved and did not.

    The update that the optimizer wanted is that of a copy of it, stepped from the same weights,
    gradients and state in a wider dtype (fp32 for 16-bit weights, fp64 for fp32 ones). An update
    that is not zero there and leaves the weight as it was has been rounded away: an Adam step of
    1e-3 on a bf16 weight of 1 is. The weights looked at are those that the optimizer steps, so
    fp32 masters where there are any. A step with a gradient that is not finite counts for nothing.

    Costs a copy of weights and state, one more step, and host syncs: to look at single steps.

    Args:
        optimizer: Any that steps without a closure, prepared by amp or plain. Its gradients are
            unscaled: under a ``GradScaler`` call ``scaler.unscale_(optimizer)`` before.

    Raises:
        ValueError: For one whose step needs a closure.

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
    own = unwrap(optimizer)
    binding = binding_of(own)
    kind = type(own) if binding is None else own_class(type(own))
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"amp.debug.frozen_updates got {kind.__name__}, whose step needs a closure: which "
            "update it wants depends on losses that only the closure can give. It takes optimizers "
            "that step without one."
        )
    if binding is not None:
        binding.settle()
    updates = FrozenUpdates()
    params = [param for param in _params(own) if param.grad is not None]
    if not _finite(params):
        yield updates
        return
    before = [param.detach().clone() for param in params]
    wide = wanted_values(own)
    yield updates
    for param, old in zip(params, before, strict=True):
        moves = (wide[param] != old.to(wide[param].dtype)) & torch.isfinite(wide[param])
        stays = moves & (param.detach() == old)
        updates.wanted += int(moves.count_nonzero())  # sync: a diagnosis, asked for
        updates.frozen += int(stays.count_nonzero())  # sync: a diagnosis, asked for


def wanted_values(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """Returns, by parameter, the values that a step in a wider dtype would give; changes nothing.

    Parameters without a gradient are left out.
    """
    wide = {param: _widened(param) for param in _params(optimizer)}
    memo = {id(param): wider for param, wider in wide.items()}
    shadow = _shadow(optimizer, memo)
    shadow.step()
    return {param: wider.detach() for param, wider in wide.items() if param.grad is not None}


def _shadow(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Returns a copy of the plain optimizer whose parameters are those in ``memo``."""
    kind = type(optimizer) if binding_of(optimizer) is None else own_class(type(optimizer))
    # An LR scheduler's wrapper of `step`, and hooks, would act on the world outside.
    own = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in (ATTRIBUTE, "step", "grad_scale", "found_inf", *_HOOKS)
    }
    shadow = object.__new__(kind)
    shadow.__dict__.update(copy.deepcopy(own, memo))
    shadow.__dict__.update({name: OrderedDict() for name in _HOOKS})
    for param, state in shadow.state.items():
        follow = functools.partial(_follow, dtype=param.dtype)
        for name, value in state.items():
            state[name] = tree.map_tensors(follow, value)
    return shadow


def _follow(value: Tensor, *, dtype: torch.dtype) -> Tensor:
    # 0-d tensors are step counts, which the kernels want as they are.
    narrower = value.dim() > 0 and value.dtype in WIDER and value.dtype.itemsize < dtype.itemsize
    return value.to(dtype) if narrower else value


def _widened(param: Tensor) -> Tensor:
    dtype = WIDER.get(param.dtype, param.dtype)
    if param.device.type == "mps" and dtype is torch.float64:  # which has none
        dtype = torch.float32
    wide = torch.nn.Parameter(param.detach().to(dtype, copy=True))
    wide.requires_grad_(param.requires_grad)
    if param.grad is not None:
        wide.grad = param.grad.detach().to(dtype, copy=True)
    return wide


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _finite(params: list[Tensor]) -> bool:
    grads = [param.grad for param in params if param.grad is not None]
    dense = map(finite.summed_values, grads)
    return all(bool(torch.isfinite(grad).all()) for grad in dense)  # sync: a diagnosis, asked for
