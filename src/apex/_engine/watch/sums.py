"""Finds running sums, which lose small terms in 16 bits, by the operators that code calls."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from apex._core import tree
from apex._torch.dynamo import is_compiling

# Operators by which an average or a counter becomes its next value, and by which values move.
_SUMS = frozenset(
    [
        "add",
        "sub",
        "mul",
        "div",
        "true_divide",
        "lerp",
        "addcmul",
        "addcdiv",
        "index_add",
        "scatter_add",
    ]
)
_MOVES = frozenset(
    [
        "to",
        "float",
        "half",
        "bfloat16",
        "type",
        "clone",
        "getitem",
        "setitem",
        "gather",
        "index_copy",
        "index_put",
        "index_select",
        "masked_scatter",
        "scatter",
        "where",
    ]
)
_REPLACES = frozenset(["copy", "zero", "fill", "set"])


class Source(enum.IntEnum):
    """What a tensor is computed from."""

    NEW = 0
    """No earlier value of a watched tensor."""
    OLD = 1
    """An earlier value."""
    SUM = 2
    """A sum that includes one."""


class Sums(TorchFunctionMode):
    """Marks the tensors that are computed from the present values of some tensors."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Watches tensors."""
        super().__init__()
        # By memory, which aliases share. The values keep it from being used for other tensors.
        self._sources = {_memory(tensor): (Source.OLD, tensor) for tensor in tensors}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_compiling():  # dynamo cannot trace the rest
            return result
        name = getattr(func, "__name__", "").strip("_").removeprefix("foreach_")
        is_sum = name in _SUMS
        replaces = name in _REPLACES
        if is_sum or replaces or name in _MOVES:
            read = args[1:] if replaces else args
            source = max(map(self.source_of, tree.tensors([read, kwargs])), default=Source.NEW)
            if is_sum and source is Source.OLD:
                source = Source.SUM
            written = args[:1] if result is None else result
            for tensor in tree.tensors(written):
                if replaces or source > self.source_of(tensor):
                    self._sources[_memory(tensor)] = source, tensor
        return result

    def source_of(self, tensor: Tensor) -> Source:
        """Returns what a tensor is computed from."""
        return self._sources.get(_memory(tensor), (Source.NEW, tensor))[0]


def _memory(tensor: Tensor) -> int:
    """Returns what stands for the memory of a tensor, or for one without memory of its own."""
    try:
        memory: int = tensor.untyped_storage()._cdata
    except NotImplementedError:  # of sparse ones, and inside transforms
        return id(tensor)
    return memory
