"""Exchanges the parameters that an optimizer holds, in its groups and its state."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping

from torch import nn
from torch.optim import Optimizer

from apex._core import tree


def exchange(optimizer: Optimizer, new: Mapping[int, nn.Parameter]) -> None:
    """Puts other parameters in place of those with these ids, also in optimizers that it holds.

    Groups, their lists and the state keep their identity.
    """
    for each in optimizers_in(optimizer) if new else ():
        for group in each.param_groups:
            group["params"][:] = [new.get(id(param), param) for param in group["params"]]
        for param in [param for param in each.state if id(param) in new]:
            each.state[new[id(param)]] = each.state.pop(param)


def move_state(optimizer: Optimizer) -> None:
    """Moves the state of parameters to their devices, also in optimizers that it holds.

    As torch does for a loaded state: the count of steps stays on the host if no kernel reads it.
    """
    for each in optimizers_in(optimizer):
        for group in each.param_groups:
            on_device = group.get("fused") or group.get("capturable")
            for param in group["params"]:
                to_device = operator.methodcaller("to", param.device)
                state = each.state.get(param, {})
                for key, value in state.items():
                    if key != "step" or on_device:
                        state[key] = tree.map_tensors(to_device, value)


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Returns an optimizer and those that it holds, perhaps in a list."""
    found = [optimizer]
    for each in found:
        found += [held for held in _held_by(each) if not any(held is known for known in found)]
    return found


def _held_by(optimizer: Optimizer) -> Iterator[Optimizer]:
    for held in vars(optimizer).values():
        for each in held if isinstance(held, list | tuple) else (held,):
            if isinstance(each, Optimizer):
                yield each
