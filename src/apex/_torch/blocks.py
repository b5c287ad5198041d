"""Runs a fused optimizer kernel block by block, with small fp32 copies of what is stored otherwise.

A block is some million elements of a list of tensors: parts of large tensors, several small ones
as a whole. Tensors are cut in the order of their memory, so all operands of a kernel must have the
strides of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from apex._torch.dispatch_modes import OPERANDS, function_of

T = TypeVar("T")

_LEAST, _GREATEST = 2**19, 2**24
"""Bounds of the elements in a block's buffers: caches hold the least, spare memory the most."""

_SHARE, _SHARE_ON_CPU = 32, 64
"""A block holds this fraction of all elements, within the bounds: each kernel ends in a barrier.

With one thread, 2**18 and 2**20 elements take the same time (66 M, torch 2.13, CPU). With two, on
a machine that also runs something else, threads wait in barriers: a quarter of the blocks takes
less than half of the time. Iterations of a transformer with 3.5 M parameters took 1.02, 1.00 and
0.98 of autocast's time with 2**18, 2**19 and 2**20 elements and two threads.
"""

_ALIGNMENT = 16
"""Elements: each part of a buffer starts at a multiple, as the kernels' vectors like it."""


def elements(total: int, device: torch.device, buffers: int = 1) -> int:
    """Returns the elements of a block, given those of all tensors and its number of buffers."""
    share = _SHARE_ON_CPU if device.type == "cpu" else _SHARE
    return max(_aligned(_LEAST // buffers), min(_GREATEST, _aligned(total // share)))


class Piece(NamedTuple):
    """A piece of one tensor of a list; a small tensor is one piece."""

    position: int
    elements: int
    whole: bool


class Cuts:
    """Cuts through a list of tensors, and others that are laid out alike.

    Large tensors are cut into pieces in the order of memory; a block is a slice of the list of all
    pieces. A tensor without elements has no piece.

    Attributes:
        pieces: The pieces of all tensors, in order.
        blocks: Slices of the list of pieces.
        greatest: Elements of the greatest block, each piece at the start of a vector.
    """

    def __init__(self, tensors: Sequence[Tensor], buffers: int = 1) -> None:
        """Cuts tensors of one device into blocks that take a number of fp32 buffers."""
        sizes = [tensor.numel() for tensor in tensors]
        self._length = elements(sum(sizes), tensors[0].device, buffers)
        self.pieces = [
            Piece(position, min(self._length, size - start), size <= self._length)
            for position, size in enumerate(sizes)
            for start in range(0, size, self._length)
        ]
        self.blocks: list[slice] = []
        self.greatest = 0
        start = filled = 0
        for index, piece in enumerate(self.pieces):
            size = _aligned(piece.elements)
            if filled + size > self._length:
                self.blocks.append(slice(start, index))
                start, filled = index, 0
            filled += size
            self.greatest = max(self.greatest, filled)
        if self.pieces:
            self.blocks.append(slice(start, len(self.pieces)))

    def of(self, tensor: Tensor) -> list[Tensor]:
        """Returns the pieces of one tensor: itself, or 1-d views."""
        if tensor.numel() > self._length:
            return list(flat(tensor).split(self._length))  # type: ignore[no-untyped-call]
        return [tensor] if tensor.numel() else []

    def of_all(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Returns the pieces of tensors that are laid out as those that were cut."""
        return [piece for tensor in tensors for piece in self.of(tensor)]

    def each(self, values: Sequence[T]) -> list[T]:
        """Returns for each piece the value of its tensor."""
        return [values[piece.position] for piece in self.pieces]


class Operand(Protocol):
    """One list of tensors that a kernel reads or writes."""

    def load(self, block: slice) -> list[Tensor]:
        """Returns the pieces of a block, for the kernel to work on in place."""

    def store(self, block: slice, values: list[Tensor]) -> None:
        """Takes the block's pieces after the kernel."""


class InPlace:
    """Pieces that the kernel works on where they are."""

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        self._pieces = list(pieces)

    def load(self, block: slice) -> list[Tensor]:
        return self._pieces[block]

    def store(self, block: slice, values: list[Tensor]) -> None:
        """Does nothing."""


Transfer = Callable[[slice, list[Tensor]], None]
"""Fills fp32 pieces of a block, or takes their values."""


class Buffered:
    """Pieces that exist in fp32 for one block at a time, in a buffer."""

    def __init__(
        self, cuts: Cuts, like: Sequence[Tensor], load: Transfer, store: Transfer | None = None
    ) -> None:
        """Allocates the buffer.

        Args:
            cuts: The cuts through the operand.
            like: Tensors with the device and the strides of the operand.
            load: Writes the operand's fp32 values into the buffer's pieces.
            store: Takes them back; ``None`` if the kernel only reads them.
        """
        self._buffer = torch.empty(cuts.greatest, dtype=torch.float32, device=like[0].device)
        self._cuts, self._like = cuts, like
        self._load, self._store = load, store

    def load(self, block: slice) -> list[Tensor]:
        values: list[Tensor] = []
        offset = 0
        for piece in self._cuts.pieces[block]:
            like = self._like[piece.position]
            size, strides = (
                (like.size(), like.stride()) if piece.whole else ((piece.elements,), (1,))
            )
            values.append(self._buffer.as_strided(size, strides, offset))
            offset += _aligned(piece.elements)
        self._load(block, values)
        return values

    def store(self, block: slice, values: list[Tensor]) -> None:
        if self._store is not None:
            self._store(block, values)


Lists = Sequence[Sequence[Tensor]]
"""The positional arguments of a fused operator."""


def divide(
    func: Any, lists: Lists, takes: Callable[[Sequence[Tensor]], bool]
) -> tuple[Lists, Lists]:
    """Divides the lists of a fused operator by parameter.

    Args:
        func: One of :data:`OPERANDS`.
        lists: Its lists of tensors.
        takes: Whether :func:`run` takes a parameter, given with its gradient and its state.

    Returns:
        The lists of the parameters that :func:`run` takes, and those of the others.
    """
    operands = zip(*filter(None, lists[: OPERANDS[func]]), strict=True)
    taken = [takes(each) for each in operands]

    def pick(which: bool) -> Lists:
        return [[t for t, own in zip(each, taken, strict=False) if own is which] for each in lists]

    return pick(True), pick(False)


def run(
    func: Any, lists: Lists, kwargs: Mapping[str, Any], cuts: Cuts, params: Operand, grads: Operand
) -> None:
    """Runs a fused operator block by block.

    Args:
        func: One of :data:`OPERANDS`.
        lists: Its lists of tensors, on one device; see :func:`same_strides`.
        kwargs: Its other arguments.
        cuts: The cuts through the first list.
        params: What it gets in place of the first list.
        grads: What it gets in place of the second list.
    """
    count = OPERANDS[func]
    kernel = function_of(func)
    operands = [params, grads, *(InPlace(cuts.of_all(each)) for each in lists[2:count])]
    steps = [cuts.each(each) for each in lists[count:]]
    for block in cuts.blocks:
        values = [operand.load(block) for operand in operands]
        kernel(*values, *(each[block] for each in steps), **kwargs)
        for operand, stored in zip(operands, values, strict=True):
            operand.store(block, stored)


def same_strides(tensor: Tensor, *others: Tensor) -> bool:
    """Returns whether all can be cut alike: equal sizes, strides and devices, without gaps."""
    size, strides, device = tensor.size(), tensor.stride(), tensor.device
    for other in others:
        if other.size() != size or other.stride() != strides or other.device != device:
            return False
    return is_dense(tensor)


def is_dense(tensor: Tensor) -> bool:
    """Returns whether the elements of a tensor follow each other in memory, in any known order."""
    return (
        tensor.is_contiguous()
        or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
        or (tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d))
    )


def flat(tensor: Tensor) -> Tensor:
    """Returns a dense tensor's elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
