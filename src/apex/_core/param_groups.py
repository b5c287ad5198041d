"""The parameters that an optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import nn
from torch.optim import Optimizer


def is_trained(param: nn.Parameter) -> bool:
    """Returns whether optimizers step ``param``: torch's step a frozen one that has a gradient."""
    return param.requires_grad or param.grad is not None


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Returns the parameters of all groups, in order."""
    return params_in(optimizer.param_groups)


def params_in(groups: Iterable[dict[str, Any]]) -> list[nn.Parameter]:
    """Returns the parameters of these groups, in order."""
    return [*chain.from_iterable([group["params"] for group in groups])]
