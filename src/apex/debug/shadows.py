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
from apex.debug import rounding_rules as rules
from apex.debug import tensors
from apex.debug.tensors import OperatorCall

Arguments = tuple[list[Any], dict[str, Any]]

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
    """Returns whether a tensor's values can have a shadow: strided and floating-point."""
    return tensor.layout is torch.strided and tensor.dtype in _REAL and tensor.device.type != "meta"


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
        func: The operator.
        name: Its name, such as ``"aten.add"``.
        inputs: How far each floating-point input is from its shadow.
        inherited: The largest relative error among the inputs. If the call continues a chain, among
            the values that entered it.
        unit: Unit roundoff of the coarsest dtype that the inputs passed through.
        shadows: Positional and keyword arguments, replaced by their shadows.
        own: Positional and keyword arguments in fp32.
        first: The first result as it was, if the call changes a lasting value by a small share.
        lacks_workspace: Whether it reads a workspace that no kernel in fp32 has filled.
    """

    def __init__(self, call: OperatorCall, shadows: Shadows) -> None:
        func, traits, args, kwargs = call
        self.func, self.name = func, rules.base_name(traits.name)
        self._arguments = [*args, *kwargs.values()]
        self._written = {id(tensor) for tensor in tree.tensors(call.overwritten())}
        own = [self._wide(shadows.own_values_of, value) for value in self._arguments]
        wide = [self._wide(shadows.values_of, value) for value in self._arguments]
        if traits.name in rules.DECIDED_BY_SECOND:
            wide[1] = own[1]
        names = [argument.name for argument in func._schema.arguments[: len(args)]]
        if "half_to_float" in names:
            own[names.index("half_to_float")] = wide[names.index("half_to_float")] = False
        count = len(args)
        self.lacks_workspace = any(
            argument.name in _WORKSPACES
            and isinstance(value, Tensor)
            and value.dtype is torch.uint8
            and shadows.workspace_of(value) is None
            for argument, value in zip(func._schema.arguments, args, strict=False)
        )
        changed = rules.changed_a_little(self.name, own[:count])
        self.first: Tensor | None = None
        if changed is not None and self._may_last(args[changed], shadows):
            self.first = own[changed].clone()
        self.shadows = wide[:count], dict(zip(kwargs, wide[count:], strict=True))
        self.own = own[:count], dict(zip(kwargs, own[count:], strict=True))
        self.inputs: list[rules.Distance] = []
        self.unit = 0.0
        errors = [
            (self._read(low, high, shadows), high.numel())
            for low, high in _pairs(self._arguments, wide)
            if traits.reads_written or id(low) not in self._written
        ]
        shares = [1.0] * len(errors)
        if self.name in rules.SUMS_OF_OPERANDS:
            # A broadcast operand counts as often as it is used.
            most = max((count for _, count in errors), default=1)
            sizes = [
                found.size * math.sqrt(most / max(1, count))
                for found, (_, count) in zip(self.inputs, errors, strict=True)
            ]
            shares = [size / (max(sizes) or 1.0) for size in sizes]
        self.inherited = max(
            (error * share for (error, _), share in zip(errors, shares, strict=True) if share),
            default=0.0,
        )

    def _may_last(self, value: Tensor, shadows: Shadows) -> bool:
        """Returns whether a value may be a state, such as an average, and not an activation."""
        if self.name not in rules.LINEAR:
            return True
        if value.requires_grad and torch.is_grad_enabled():
            return False
        shadow = shadows.of(value)
        return shadow is None or (id(value) in self._written and shadow.entry is not None)

    def _wide(self, values_of: Callable[[Tensor], Tensor], value: Any) -> Any:
        if isinstance(value, Tensor):
            return values_of(value).clone() if id(value) in self._written else values_of(value)
        if isinstance(value, torch.dtype):
            return torch.float32 if value in dtypes.LOW_PRECISION else value
        if isinstance(value, list | tuple):
            return [self._wide(values_of, item) for item in value]
        return value

    def _read(self, low: Tensor, high: Tensor, shadows: Shadows) -> float:
        """Measures an input; returns the error that it brings."""
        if dtypes.is_low_precision(low):
            self.unit = max(self.unit, rules.roundoff(low.dtype))
        found = rules.distance(low.detach(), high)
        self.inputs.append(found)
        shadow = shadows.of(low)
        if shadow is None:
            return 0.0
        self.unit = max(self.unit, shadow.unit)
        in_chain = self.name in rules.LINEAR and low.numel() == shadow.values.numel()
        return found.relative if not in_chain or shadow.entry is None else shadow.entry

    def pairs(self, result: Any, arguments: Arguments, in_fp32: Any) -> list[tuple[Tensor, Tensor]]:
        """Returns each tensor that the call returned or wrote, with its value in fp32.

        The call in fp32 returned ``in_fp32`` and wrote to ``arguments``, ``shadows`` or ``own``.
        """
        wide = [*arguments[0], *arguments[1].values()]
        written = [p for p in _pairs(self._arguments, wide) if id(p[0]) in self._written]
        known = {id(low) for low, _ in written}
        return [*written, *(p for p in _pairs([result], [in_fp32]) if id(p[0]) not in known)]


def _pairs(lows: Any, highs: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the pairs of floating-point tensors in two nestings of the same structure."""
    for low, high in zip(lows, highs, strict=True):
        if isinstance(low, Tensor) and isinstance(high, Tensor):
            if can_shadow(low) and can_shadow(high):
                yield low, high
        elif isinstance(low, list | tuple):
            yield from _pairs(low, high)
