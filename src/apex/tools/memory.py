"""Memory in bytes: stored between steps, and saved by autograd for a backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apex import amp
from apex._core import tree
from apex._torch.packed import stored_tensors
from apex.tools.results import Stored


def stored(model: nn.Module, optimizer: Optimizer) -> Stored:
    """Returns the bytes of parameters, masters and optimizer state; shared storage counts once."""
    seen: set[int] = set()
    state = [tensor for entry in optimizer.state.values() for tensor in tree.tensors(entry)]
    return Stored(
        params=sum(param.numel() for param in model.parameters()),
        model=_new_bytes(model.parameters(), seen),
        masters=_new_bytes(amp.master_params(optimizer), seen),
        optimizer=_new_bytes(state, seen),
    )


class SavedBytes:
    """A running count of the bytes that autograd saved for backward."""

    def __init__(self) -> None:
        """Starts at zero."""
        self.total = 0


@contextmanager
def saved_for_backward(model: nn.Module) -> Iterator[SavedBytes]:
    """Counts the storages that autograd saves for backward during the forward pass inside.

    The model's own parameters do not count, since they exist anyway; cast copies of them do.
    """
    saved = SavedBytes()
    seen = {_key(param) for param in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        saved.total += _new_bytes([tensor], seen)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved


def _new_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Returns the bytes of storages not in ``seen`` and adds those storages to it."""
    total = 0
    for tensor in (part for each in tensors for part in _parts(each)):
        if tensor.layout is torch.strided and _key(tensor) not in seen:
            seen.add(_key(tensor))
            total += tensor.untyped_storage().nbytes()
    return total


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the tensor, or those inside a wrapper without a storage, such as 8-bit moments."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield from stored_tensors(tensor)
    else:
        for name in flatten()[0]:
            yield from _parts(getattr(tensor, name))


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
