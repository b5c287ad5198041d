"""The parameters that an optimizer steps, and their state."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

_params = operator.itemgetter("params")


def is_trained(param: nn.Parameter) -> bool:
    """Returns whether optimizers step ``param``: torch's step a frozen one that has a gradient."""
    return param.requires_grad or param.grad is not None


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Returns the parameters of all groups, in order."""
    return params_in(optimizer.param_groups)


def params_in(groups: Iterable[dict[str, Any]]) -> list[nn.Parameter]:
    """Returns the parameters of these groups, in order."""
    return [*chain.from_iterable(map(_params, groups))]


def states_in(state: Mapping[Any, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yields parameters and their state in an optimizer's, without what it keeps beside them.

    torch's ``state_dict`` allows other keys: some optimizers count their steps under a name.
    """
    for param, own in state.items():
        if isinstance(param, Tensor):
            yield param, own


def is_from(optimizer: Any, module: str) -> bool:
    """Returns whether a class of this module is among the optimizer's, ours or NVIDIA's."""
    return any(kind.__module__ == module for kind in type(optimizer).__mro__)
