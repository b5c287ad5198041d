"""torch internals that a subclass of ``nn.Parameter`` needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer

set_data: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""torch's own setter of ``param.data``."""

set_grad: Any = torch.Tensor.grad.__set__  # type: ignore[union-attr]
"""torch's own setter of ``param.grad``, past a property of its class."""

grad_of: Callable[[Tensor], Tensor | None] = torch.Tensor.grad.__get__  # type: ignore[union-attr]
"""Returns the gradient that autograd holds for a parameter, past a property of its class."""

uncounted: Callable[[Tensor], Tensor] = torch.Tensor.data.__get__  # type: ignore[attr-defined]
"""Returns an alias of a tensor; writes to it do not increment the version counter."""


def allow_foreach(kind: type[Tensor]) -> None:
    """Lets torch's optimizers use their foreach form for parameters of class ``kind``.

    They compare types with a private list. A torch release without that list accepts all types, or
    steps the parameters one by one.
    """
    supported = getattr(optimizer, "_foreach_supported_types", None)
    if isinstance(supported, list) and kind not in supported:
        supported.append(kind)
