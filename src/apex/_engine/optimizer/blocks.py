"""Runs a fused optimizer kernel block by block, with small fp32 copies of what is stored otherwise.

A block is some million elements of a list of tensors: parts of large tensors, several small ones
as a whole. Tensors are cut in the order of their memory, so all operands of a kernel must have the
strides of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

ELEMENTS = 2**18
"""Elements of a block: 1 MB in fp32."""

_ALIGNMENT = 16
"""Elements: each part of a buffer starts at a multiple, as the kernels' vectors like it."""


class Part(NamedTuple):
    """A part of one tensor of a list: elements ``start`` to ``stop`` in the order of memory."""

    index: int
    start: int
    stop: int
    whole: bool

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the part as a 1-d view; a whole tensor itself."""
        tensor = tensors[self.index]
        if self.whole:
            return tensor
        return tensor.as_strided(
            (self.stop - self.start,), (1,), tensor.storage_offset() + self.start
        )


Block = Sequence[Part]


def cut(sizes: Sequence[int]) -> Iterator[Block]:
    """Yields tensors with these numbers of elements in blocks of at most ``ELEMENTS``.

    Those that fit into a block stay whole.
    """
    block = ELEMENTS
    parts: list[Part] = []
    free = block
    for index, size in enumerate(sizes):
        if size > free and parts:
            yield parts
            parts, free = [], block
        for start in range(0, size, block):
            stop = min(size, start + block)
            parts.append(Part(index, start, stop, whole=stop - start == size))
            free -= _aligned(stop - start)
            if free <= 0:
                yield parts
                parts, free = [], block
    if parts:
        yield parts


class Operand(Protocol):
    """One list of tensors that a kernel reads or writes."""

    def load(self, block: Block) -> list[Tensor]:
        """Returns the tensors of a block, for the kernel to work on in place."""

    def store(self, block: Block, values: list[Tensor]) -> None:
        """Takes the block's tensors after the kernel."""


class InPlace:
    """Tensors that the kernel works on where they are."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Stores them."""
        self._tensors = tensors

    def load(self, block: Block) -> list[Tensor]:
        """Returns views."""
        return [part.of(self._tensors) for part in block]

    def store(self, block: Block, values: list[Tensor]) -> None:
        """Does nothing."""


class Nothing:
    """A list that the kernel leaves out."""

    def load(self, block: Block) -> list[Tensor]:
        """Returns an empty list."""
        return []

    def store(self, block: Block, values: list[Tensor]) -> None:
        """Does nothing."""


Transfer = Callable[[Block, list[Tensor]], None]
"""Fills fp32 tensors of a block, or takes their values."""


class Buffered:
    """Tensors that exist in fp32 for one block at a time, in a buffer."""

    def __init__(
        self, like: Sequence[Tensor], load: Transfer, store: Transfer | None = None
    ) -> None:
        """Allocates the buffer.

        Args:
            like: Tensors with the device and the strides of the operand.
            load: Writes the operand's fp32 values into the buffer's tensors.
            store: Takes them back; ``None`` if the kernel only reads them.
        """
        needed = sum(_aligned(tensor.numel()) for tensor in like)
        size = min(ELEMENTS, needed)
        self._buffer = torch.empty(size, dtype=torch.float32, device=like[0].device)
        self._like = like
        self._load, self._store = load, store

    def load(self, block: Block) -> list[Tensor]:
        """Returns tensors in the buffer, filled."""
        values: list[Tensor] = []
        offset = 0
        for part in block:
            like = self._like[part.index]
            size = part.stop - part.start
            shape = (like.size(), like.stride()) if part.whole else ((size,), (1,))
            values.append(self._buffer.as_strided(*shape, offset))
            offset += _aligned(size)
        self._load(block, values)
        return values

    def store(self, block: Block, values: list[Tensor]) -> None:
        """Hands the values on."""
        if self._store is not None:
            self._store(block, values)


def run(
    kernel: Callable[[Block, list[list[Tensor]]], None],
    sizes: Sequence[int],
    operands: Sequence[Operand],
) -> None:
    """Runs ``kernel`` on each block of its operands.

    Args:
        kernel: Takes a block, and one list of tensors per operand.
        sizes: Elements of each tensor.
        operands: Lists of tensors, each as long as ``sizes``.
    """
    for parts in cut(sizes):
        values = [operand.load(parts) for operand in operands]
        kernel(parts, values)
        for operand, stored in zip(operands, values, strict=True):
            operand.store(parts, stored)


def same_strides(tensor: Tensor, like: Tensor) -> bool:
    """Returns whether both can be cut alike: equal sizes, strides and device, without gaps."""
    return (
        tensor.stride() == like.stride()
        and tensor.size() == like.size()
        and tensor.device == like.device
        and (
            like.is_contiguous()
            or (like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last))
            or (like.dim() == 5 and like.is_contiguous(memory_format=torch.channels_last_3d))
        )
    )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
