"""The fp32 shadows of values that low precision touched, by their memory, and calls on shadows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils.weak import WeakIdKeyDictionary

from apex._core import dtypes, tree
from apex._torch.sparse import with_memory
from apex.debug import rounding_rules as rules
from apex.debug import tensors
from apex.debug.tensors import OperatorCall

Pair = tuple[Tensor, Tensor]
"""A tensor, and its values in fp32."""

_REAL = {
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
"""The dtypes of values that have a shadow, and of the elements that they consist of."""

_WORKSPACES = {"workspace", "reserve", "reserveSpace"}
"""Names of arguments that a kernel fills for its backward in a layout of its own."""

_WIDENS = {"aten._softmax", "aten._log_softmax"}
"""Operators whose third argument is whether they return fp32 for fp16."""


@dataclass
class Shadow:
    """The shadow of one storage.

    Attributes:
        values: One value for each element of the storage, 1-d, in fp32 (fp64 for fp64).
        real: Dtype of the storage's elements.
        unit: Unit roundoff of the coarsest dtype that the values passed through.
        entry: The error with which the running chain began, see Note [Chains] in
            ``rounding_rules``; None outside a chain.
    """

    values: Tensor
    real: torch.dtype
    unit: float
    entry: float | None

    def view(self, tensor: Tensor) -> Tensor:
        """Returns the shadow of a view of the storage, which shares memory with it."""
        values = self.values
        if tensor.is_complex():
            values = torch.view_as_complex(values.view(-1, 2))
        values = values.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        values = values.conj() if tensor.is_conj() else values
        return torch._neg_view(values) if tensor.is_neg() else values


class Shadows:
    """The shadows of all live storages; a value without one is exact."""

    def __init__(self) -> None:
        self._by_storage: MutableMapping[UntypedStorage, Shadow] = WeakIdKeyDictionary()
        self._workspaces: MutableMapping[UntypedStorage, Tensor] = WeakIdKeyDictionary()

    def of(self, tensor: Tensor) -> Shadow | None:
        """Returns the shadow of a tensor's storage; None if its values are exact."""
        if not can_shadow(tensor):
            return None
        shadow = self._by_storage.get(tensor.untyped_storage())
        return shadow if shadow is not None and shadow.real is _REAL[tensor.dtype] else None

    def values_of(self, tensor: Tensor) -> Tensor:
        """Returns the shadow of a tensor; without one, its own values. May be a view."""
        shadow = self.of(tensor)
        return self.own_values_of(tensor) if shadow is None else shadow.view(tensor)

    def own_values_of(self, tensor: Tensor) -> Tensor:
        """Returns a tensor's own values in the dtype of shadows; of other tensors, themselves."""
        tensor = with_memory(tensor)
        if can_shadow(tensor):
            return widened(tensor)
        return tensor if (found := self.workspace_of(tensor)) is None else found

    def workspace_of(self, tensor: Tensor) -> Tensor | None:
        """Returns the workspace that the fp32 form of a kernel filled beside ``tensor``."""
        if tensor.dtype is not torch.uint8 or tensor.layout is not torch.strided:
            return None
        return self._workspaces.get(tensor.untyped_storage())

    def keep_workspace(self, tensor: Tensor, in_fp32: Tensor) -> None:
        """Records the workspace that the fp32 form of a kernel filled, for its backward pass."""
        self._workspaces[tensor.untyped_storage()] = in_fp32

    def write(self, tensor: Tensor, values: Tensor, *, unit: float, entry: float | None) -> None:
        """Makes ``values`` the shadow of a tensor that an operator has just written."""
        shadow = self.of(tensor)
        if shadow is None:
            shadow = Shadow(_whole(tensor), _REAL[tensor.dtype], unit, entry)
            self._by_storage[tensor.untyped_storage()] = shadow
        else:
            shadow.unit = max(unit, shadow.unit)
            entries = [each for each in (entry, shadow.entry) if each is not None]
            covered = tensor.numel() == shadow.values.numel()
            shadow.entry = entry if covered else max(entries, default=None)
        shadow.view(tensor).copy_(values)

    def discard(self, tensor: Tensor) -> None:
        """Makes a tensor's own values exact, with those that share its storage."""
        if can_shadow(tensor):
            self._by_storage.pop(tensor.untyped_storage(), None)

    def touch(self, values: Any) -> bool:
        """Returns whether any tensor in nested lists is in low precision or has a shadow."""
        return any(
            dtypes.is_low_precision(tensor) or self.of(tensor) is not None
            for tensor in tensors.floating(values)
        )


def can_shadow(tensor: Tensor) -> bool:
    """Returns whether a tensor's values can have a shadow: strided, floating-point, in memory."""
    has_memory = tensor.device.type != "meta" and with_memory(tensor) is tensor
    return tensor.layout is torch.strided and tensor.dtype in _REAL and has_memory


def widened(tensor: Tensor) -> Tensor:
    """Returns a tensor's own values in the dtype of shadows; fp32 and fp64 are not copied."""
    tensor = tensor.detach()
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor


def _whole(tensor: Tensor) -> Tensor:
    """Returns a copy of all values of a tensor's storage, in the dtype of shadows."""
    stored = torch.empty(0, dtype=_REAL[tensor.dtype], device=tensor.device)
    return widened(stored.set_(tensor.untyped_storage())).clone()


class ShadowCall:
    """One operator call; created before it runs, if it writes to its arguments.

    Attributes:
        name: The operator's name, such as ``"aten.add"``.
        inputs: How far each floating-point input is from its shadow.
        inherited: The largest relative error among the inputs. If the call continues a chain, among
            the values that entered it.
        unit: Unit roundoff of the coarsest dtype that the inputs passed through.
        shadows: The call on the shadows of its arguments.
        own: The call on its arguments in fp32.
        first: The first result as it was, if the call changes a lasting value by a small share.
        lacks_workspace: Whether it reads a workspace that no kernel in fp32 has filled.
    """

    def __init__(self, call: OperatorCall, shadows: Shadows) -> None:
        if call.traits.name in _WIDENS:
            call = call._replace(args=(*call.args[:2], False))
        self.name = call.traits.name.replace("aten._foreach_", "aten.")  # which applies it to each
        self._call = call
        self._written = {id(tensor) for tensor in tree.tensors(call.overwritten())}
        self._own_pairs: list[Pair] | None = None
        self.own = self._in_fp32(shadows.own_values_of)
        self.shadows = self._in_fp32(shadows.values_of)
        if call.traits.name in rules.DECIDED_BY_SECOND:
            first, _, *rest = self.shadows.args
            self.shadows = self.shadows._replace(args=(first, self.own.args[1], *rest))
        self.lacks_workspace = any(
            argument.name in _WORKSPACES
            and isinstance(value, Tensor)
            and value.dtype is torch.uint8
            and shadows.workspace_of(value) is None
            for argument, value in zip(call.func._schema.arguments, call.args, strict=False)
        )
        changed = rules.changed_a_little(self.name, self.own.args)
        self.first: Tensor | None = None
        if changed is not None and self._may_last(call.args[changed], shadows):
            self.first = self.own.args[changed].clone()
        read = [
            (low, high, shadows.of(low))
            for low, high in _pairs(call.arguments, self.shadows.arguments)
            if call.traits.reads_written or id(low) not in self._written
        ]
        units = [rules.roundoff(low.dtype) for low, _, _ in read if dtypes.is_low_precision(low)]
        self.unit = max([*units, *(shadow.unit for *_, shadow in read if shadow)], default=0.0)
        self.inputs = [rules.distance(low.detach(), high) for low, high, _ in read]
        self.inherited = self._inherited(read)

    def _may_last(self, value: Tensor, shadows: Shadows) -> bool:
        """Returns whether a value may be a state, such as an average, and not an activation."""
        if self.name not in rules.LINEAR:
            return True
        if value.requires_grad and torch.is_grad_enabled():
            return False
        shadow = shadows.of(value)
        return shadow is None or (id(value) in self._written and shadow.entry is not None)

    def _in_fp32(self, values_of: Callable[[Tensor], Tensor]) -> OperatorCall:
        """Returns the call on these values in fp32, and on copies of those that it writes."""

        def wide(tensor: Tensor) -> Tensor:
            values = values_of(tensor)
            return values.clone() if id(tensor) in self._written else values

        return self._call.mapped(wide, dict.fromkeys(dtypes.LOW_PRECISION, torch.float32))

    def _inherited(self, read: list[tuple[Tensor, Tensor, Shadow | None]]) -> float:
        """Returns the largest error among the inputs; in a sum, by their shares of the largest."""
        errors, sizes = [], []
        for (low, high, shadow), found in zip(read, self.inputs, strict=True):
            entry = None
            if self.name in rules.LINEAR and shadow and low.numel() == shadow.values.numel():
                entry = shadow.entry
            errors.append(found.relative if entry is None else entry)
            # A broadcast operand counts as often as it is used.
            sizes.append(found.size / math.sqrt(max(1, high.numel())))
        if self.name in rules.SUMS_OF_OPERANDS:
            largest = max(sizes, default=0.0)
            errors = [e * s / largest for e, s in zip(errors, sizes, strict=True) if s]
        return max(errors, default=0.0)

    def run(self, in_fp32: OperatorCall, result: Any) -> tuple[list[Pair], list[Pair]]:
        """Runs ``shadows`` or ``own``, whose arguments it may overwrite.

        Returns:
            Each tensor that the call returned in ``result`` or wrote, with its value in fp32; and
            each workspace that it filled, with that of the call in fp32.
        """
        if self.name == "aten.native_dropout":  # with the mask of the run
            values, share = in_fp32.args[:2]
            wide: Any = values * result[1] / (1.0 - share or 1.0), result[1]
        else:
            wide = in_fp32.run()
        found: dict[int, Pair] = {}
        for low, high in _pairs(self._call.arguments, in_fp32.arguments):
            if id(low) in self._written:
                found[id(low)] = low, high
        for low, high in _pairs([result], [wide]):
            found.setdefault(id(low), (low, high))
        both = zip(result, wide, strict=True) if isinstance(result, tuple) else ()
        filled = [
            (low, high)
            for low, high in both
            if isinstance(low, Tensor) and low.dtype is torch.uint8 and isinstance(high, Tensor)
        ]
        return list(found.values()), filled

    def own_pairs(self, result: Any) -> list[Pair]:
        """Returns each result with its value for the inputs that the call got; runs once."""
        if self._own_pairs is None:
            self._own_pairs = self.run(self.own, result)[0]
        return self._own_pairs


def _pairs(lows: Any, highs: Any) -> Iterator[Pair]:
    """Yields the pairs of floating-point tensors in two nestings of the same structure."""
    for low, high in zip(lows, highs, strict=True):
        if isinstance(low, Tensor) and isinstance(high, Tensor):
            if can_shadow(low) and can_shadow(high):
                yield low, high
        elif isinstance(low, list | tuple):
            yield from _pairs(low, high)
