"""apex's ``applier``: casts the tensors in a model's inputs and outputs; scripts may replace it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from apex._core.nested import map_tensors


def applier(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Returns ``value`` with ``fn`` applied to every tensor in it, container types kept."""
    return map_tensors(fn, value)
