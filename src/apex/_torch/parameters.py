"""What a subclass of ``nn.Parameter`` needs from torch beside its public interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer

set_data: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""Does ``param.data = value`` as torch's own property does."""

_get_data: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]


def uncounted(tensor: Tensor) -> Tensor:
    """Returns the values of ``tensor``; its version counter does not see what is written there."""
    values: Tensor = _get_data(tensor)
    return values


def let_foreach_take(kind: type[Tensor]) -> None:
    """Lets torch's optimizers choose their foreach form for parameters of a subclass.

    They ask a list of types by identity (private). A torch without it needs no permission, or steps
    the parameters one by one.
    """
    supported = getattr(optimizer, "_foreach_supported_types", None)
    if isinstance(supported, list) and kind not in supported:
        supported.append(kind)
