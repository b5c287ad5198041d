"""Bytes of tensors, with each storage counted once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Storages:
    """A running count of the bytes of storages.

    Attributes:
        total: The bytes so far.
    """

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        """Starts at zero; the storages of ``ignored``, such as a model's weights, do not count."""
        self.total = 0
        self._seen: set[int] = set()
        self.add(ignored)
        self.total = 0

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Counts the storages of tensors that are new; returns their bytes."""
        before = self.total
        for tensor in (part for each in tensors for part in _parts(each)):
            if tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                self.total += storage.nbytes()
        return self.total - before

    def of_saved_tensors(self) -> saved_tensors_hooks:
        """Returns a context that counts what autograd saves for backward inside.

        Cast copies of ignored parameters count.
        """

        def pack(tensor: Tensor) -> Tensor:
            self.add([tensor])
            return tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the tensor, or those inside a wrapper without a storage, such as 8-bit moments."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
    else:
        for name in flatten()[0]:
            yield from _parts(getattr(tensor, name))
