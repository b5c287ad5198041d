"""torch internals that a subclass of ``nn.Parameter`` needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer

set_data: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""torch's own setter of ``param.data``."""

set_grad: Any = torch.Tensor.grad.__set__  # type: ignore[union-attr]
"""torch's own setter of ``param.grad``, past a property of its class."""

_get_data: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_get_grad: Any = torch.Tensor.grad.__get__  # type: ignore[union-attr]


def uncounted(tensor: Tensor) -> Tensor:
    """Returns an alias of ``tensor``; writes to it do not increment the version counter."""
    values: Tensor = _get_data(tensor)
    return values


def allow_foreach(kind: type[Tensor]) -> None:
    """Lets torch's optimizers use their foreach form for parameters of class ``kind``.

    They compare types with a private list. A torch release without that list accepts all types, or
    steps the parameters one by one.
    """
    supported = getattr(optimizer, "_foreach_supported_types", None)
    if isinstance(supported, list) and kind not in supported:
        supported.append(kind)


def grad_of(param: Tensor) -> Tensor | None:
    """Returns the gradient that autograd holds for ``param``, past a property of its class."""
    grad: Tensor | None = _get_grad(param)
    return grad
