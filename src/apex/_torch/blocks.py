"""Runs a fused optimizer kernel block by block, with small fp32 copies of what is stored otherwise.

A block is some million elements of a list of tensors: parts of large tensors, several small ones
as a whole. Tensors are cut in the order of their memory, so all operands of a kernel must have the
strides of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from apex._torch.dispatch_modes import OPERANDS, function_of

_LEAST, _GREATEST = 2**18, 2**24
"""Bounds of a block's elements: the least fit into a CPU's cache, the most into spare memory."""

_SHARE, _SHARE_ON_CPU = 32, 64
"""A block holds this fraction of all elements, within the bounds: each kernel ends in a barrier.

With one thread, 2**18 and 2**20 elements take the same time (66 M, torch 2.13, CPU). With two, on
a machine that also runs something else, threads wait in barriers: a quarter of the blocks takes
less than half of the time.
"""

_ALIGNMENT = 16
"""Elements: each part of a buffer starts at a multiple, as the kernels' vectors like it."""


class Part(NamedTuple):
    """A part of one tensor of a list: elements ``start`` to ``stop`` in the order of memory."""

    position: int
    start: int
    stop: int
    whole: bool

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the part as a 1-d view; a whole tensor itself."""
        return self.in_(tensors[self.position])

    def in_(self, tensor: Tensor) -> Tensor:
        """Returns the part of its tensor, or of one with the same layout."""
        if self.whole:
            return tensor
        return tensor.as_strided(
            (self.stop - self.start,), (1,), tensor.storage_offset() + self.start
        )


Block = Sequence[Part]


def elements(total: int, device: torch.device) -> int:
    """Returns the elements of a block, given those of all tensors."""
    share = _SHARE_ON_CPU if device.type == "cpu" else _SHARE
    return max(_LEAST, min(_GREATEST, _aligned(total // share)))


def cut(sizes: Sequence[int], device: torch.device) -> Iterator[Block]:
    """Yields tensors with these numbers of elements in blocks; those that fit into one stay whole.

    The first cut of a tensor, and each one after it, is a block's length after its start.
    """
    block = elements(sum(sizes), device)
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
    """Tensors that the kernel works on where they are, or an empty list."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def load(self, block: Block) -> list[Tensor]:
        return [part.of(self._tensors) for part in block] if self._tensors else []

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
        device = like[0].device
        needed = sum(_aligned(tensor.numel()) for tensor in like)
        size = min(needed, elements(sum(tensor.numel() for tensor in like), device))
        self._buffer = torch.empty(size, dtype=torch.float32, device=device)
        self._like = like
        self._load, self._store = load, store

    def load(self, block: Block) -> list[Tensor]:
        values: list[Tensor] = []
        offset = 0
        for part in block:
            like = self._like[part.position]
            size = part.stop - part.start
            flat = self._buffer[offset : offset + size]
            values.append(flat.as_strided(like.size(), like.stride()) if part.whole else flat)
            offset += _aligned(size)
        self._load(block, values)
        return values

    def store(self, block: Block, values: list[Tensor]) -> None:
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
    func: Any, lists: Lists, kwargs: Mapping[str, Any], params: Operand, grads: Operand
) -> None:
    """Runs a fused operator block by block.

    Args:
        func: One of :data:`OPERANDS`.
        lists: Its lists of tensors, on one device; see :func:`same_strides`.
        kwargs: Its other arguments.
        params: What it gets in place of the first list.
        grads: What it gets in place of the second list.
    """
    count = OPERANDS[func]
    kernel = function_of(func)
    operands = [params, grads, *map(InPlace, lists[2:count])]
    for block in cut([param.numel() for param in lists[0]], lists[0][0].device):
        values = [operand.load(block) for operand in operands]
        steps = [[each[part.position] for part in block] for each in lists[count:]]
        kernel(*values, *steps, **kwargs)
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
