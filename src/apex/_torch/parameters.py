"""torch internals that a subclass of ``nn.Parameter`` needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor as FakeTensor
from torch.optim import optimizer

from apex._torch.dispatcher import TORCH_VERSION

set_data: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""torch's own setter of ``param.data``."""

set_grad: Any = torch.Tensor.grad.__set__  # type: ignore[union-attr]
"""torch's own setter of ``param.grad``, past a property of its class."""

grad_of: Callable[[Tensor], Tensor | None] = torch.Tensor.grad.__get__  # type: ignore[union-attr]
"""Returns the gradient that autograd holds for a parameter, past a property of its class."""

set_requires_grad: Any = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
"""torch's own setter of ``param.requires_grad``, past a property of its class."""

requires_grad_of: Callable[[Tensor], bool] = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
"""Returns whether autograd computes gradients for a parameter, past a property of its class."""

uncounted: Callable[[Tensor], Tensor] = torch.Tensor.data.__get__  # type: ignore[attr-defined]
"""Returns an alias of a tensor; writes to it do not increment the version counter."""

# Private, as in torch's guide to extending it, which shows no public way to call a plain function.
without_overrides = torch._C.DisableTorchFunctionSubclass
"""A context in which subclasses of ``Tensor`` do not see calls of torch's functions.

Without it, torch searches masters, which are of a subclass, for overrides at every access to
``grad`` and at every operator: 7 % of the instructions of an iteration of 150 tiny layers at O2
(torch 2.13, CPU).
"""

keeps_any_grad = TORCH_VERSION >= (2, 10)
"""Whether a 16-bit parameter may hold an fp32 gradient (``Tensor.grad_dtype``), as masters need."""

without_functions = torch._C.DisableTorchFunction
"""A context in which function modes do not see calls of torch's functions, either."""


def allow_foreach(kind: type[Tensor]) -> None:
    """Lets torch's optimizers use their foreach form for parameters of class ``kind``.

    They compare types with a private list.
    """
    optimizer._foreach_supported_types.append(kind)


def set_in_place(tensor: Tensor, value: Tensor, undo: ExitStack) -> None:
    """Gives ``tensor`` the storage and dtype of ``value``, its gradient the same dtype.

    ``undo`` receives the inverse, which allocates no memory.
    """
    grad: Tensor | None = None
    new_grad: Tensor | None = None
    if tensor.is_leaf and tensor.grad is not None:
        grad = tensor.grad
        new_grad = grad.detach().to(value.dtype)
    undo.callback(_assign, tensor, tensor.data, grad)
    _assign(tensor, value, new_grad)


def _assign(tensor: Tensor, data: Tensor, grad: Tensor | None) -> None:
    tensor.grad = None  # torch rejects a gradient whose dtype differs from its tensor's
    keeps_own = keeps_any_grad and tensor.is_leaf and tensor.grad_dtype is tensor.dtype
    tensor.data = data
    if keeps_own:  # which torch lets follow, unless a script has set it
        tensor.grad_dtype = data.dtype
    if grad is not None and grad.shape == data.shape:  # a script may have resized the data
        tensor.grad = grad
