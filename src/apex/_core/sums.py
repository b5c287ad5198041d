"""Tells sums, which 16 bits lose, from other writes, by the operators that a function calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from apex._core import tree

# Operators by which an average or a counter becomes its next value, and by which values move.
_SUMS = frozenset(
    ["add", "sub", "mul", "div", "truediv", "true_divide", "lerp", "addcmul", "addcdiv"]
)
_MOVES = frozenset(["to", "float", "half", "bfloat16", "type", "clone", "detach", "getitem"])
_REPLACES = frozenset(["copy", "zero", "fill", "set"])

_OLD, _SUM = 1, 2
"""Marks of tensors with a value from before, and of sums with such a value."""


class Sums(TorchFunctionMode):
    """Finds the tensors whose next value is a sum with their value before."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Watches tensors, by name."""
        super().__init__()
        self._before = {name: (id(tensor), tensor._version) for name, tensor in tensors.items()}
        # By ``id``, with the tensors, so that no other gets their ``id``.
        self._marks = {id(tensor): (_OLD, tensor) for tensor in tensors.values()}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").strip("_").removeprefix("foreach_")
        is_sum = name in _SUMS or name[1:] in _SUMS  # iadd, radd
        replaces = name in _REPLACES
        if is_sum or replaces or name in _MOVES or name == "setitem":
            sources = [args[1:] if replaces or name == "setitem" else args, kwargs]
            mark = max((self._mark(tensor) for tensor in tree.tensors(sources)), default=0)
            if is_sum and mark:
                mark = _SUM
            for target in tree.tensors(args[:1] if result is None else result):
                if replaces or mark > self._mark(target):
                    self._marks[id(target)] = mark, target
        return result

    def _mark(self, tensor: Tensor) -> int:
        return self._marks.get(id(tensor), (0, None))[0]

    def found(self, now: Mapping[str, Tensor]) -> list[str]:
        """Returns the names of tensors that became a sum, or were not written; as they are now."""
        summed = []
        for name, before in self._before.items():
            tensor = now.get(name)
            if tensor is not None:
                mark = self._mark(tensor)
                unwritten = mark == _OLD and before == (id(tensor), tensor._version)
                if mark == _SUM or (unwritten and tensor.numel() > 1):
                    summed.append(name)
        return summed
