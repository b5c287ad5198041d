"""The fp32 shadow of every value that low precision touched, found by the memory that holds it."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage
from torch.utils.weak import WeakIdKeyDictionary

_REAL = {
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
"""The dtypes of values that have a shadow, and of the elements that they consist of."""


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
