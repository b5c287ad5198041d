"""The parameters that an optimizer steps, and their state."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex._core import dtypes, tree

_FUSED_ADAM = "apex.optimizers.fused_adam"


def is_trained(param: nn.Parameter) -> bool:
    """Returns whether optimizers step ``param``: torch's step a frozen one that has a gradient."""
    return param.requires_grad or param.grad is not None


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Returns the parameters of all groups, in order."""
    params: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        params += group["params"]
    return params


def states_in(state: Mapping[Any, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yields each parameter in an optimizer's state, with the parameter's own state.

    Skips other keys, which torch allows: some optimizers count their steps under a name.
    """
    for param, own in state.items():
        if isinstance(param, Tensor):
            yield param, own


def is_from(optimizer: Any, module: str) -> bool:
    """Returns whether the optimizer's class, or a base class, is from this module."""
    return any(kind.__module__ == module for kind in type(optimizer).__mro__)


def exchange(optimizer: Optimizer, new: Mapping[int, nn.Parameter]) -> None:
    """Replaces the parameters with these ids, also in optimizers that the optimizer contains.

    Groups, their lists and the state keep their identity.
    """
    for holder in optimizers_in(optimizer):
        for group in holder.param_groups:
            params = group["params"]
            params[:] = [new.get(id(param), param) for param in params]
        for param in list(holder.state):
            replacement = new.get(id(param))
            if replacement is not None:
                holder.state[replacement] = holder.state.pop(param)


def move_state(optimizer: Optimizer) -> None:
    """Moves each parameter's state to its device, also in optimizers that the optimizer contains.

    As torch does for a loaded state: the count of steps stays on the host if no kernel reads it.
    """
    for holder in optimizers_in(optimizer):
        for group in holder.param_groups:
            on_device = group.get("fused") or group.get("capturable")
            for param in group["params"]:
                to_device = operator.methodcaller("to", param.device)
                state = holder.state.get(param, {})
                for key, value in state.items():
                    stays = key == "step" and not on_device
                    if not stays:
                        state[key] = tree.map_tensors(to_device, value)


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Returns an optimizer and those that it holds, perhaps in a list."""
    optimizers = [optimizer]
    for holder in optimizers:  # which grows meanwhile
        for value in vars(holder).values():
            parts = value if isinstance(value, list | tuple) else [value]
            for held in parts:
                if isinstance(held, Optimizer) and held not in optimizers:
                    optimizers.append(held)
    return optimizers


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
            for param, state in states_in(part.state):
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
