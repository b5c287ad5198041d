"""Runs a fused optimizer kernel block by block, with small fp32 copies of what is stored otherwise.

A block is some million elements of a list of tensors: parts of large tensors, several small ones
as a whole. Tensors are cut in the order of their memory, so all operands of a kernel must have the
strides of its parameters.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from apex._torch.dispatch_modes import OPERANDS, function_of

T = TypeVar("T")

_layout, _place = operator.attrgetter("layout"), operator.attrgetter("shape", "device")

_LEAST, _GREATEST = 2**19, 2**24
"""Bounds of the elements in a block's buffers: caches hold the least, spare memory the most.

The others are multiples of the least, so :func:`parts` are the same in blocks of any length.
"""

_SHARE, _SHARE_ON_CPU = 32, 64
"""A block holds this fraction of all elements, within the bounds: each kernel ends in a barrier.

With one thread, 2**18 and 2**20 elements take the same time (66 M, torch 2.13, CPU). With two, on
a machine that also runs something else, threads wait in barriers: a quarter of the blocks takes
less than half of the time. Iterations of a transformer with 3.5 M parameters took 1.02, 1.00 and
0.98 of autocast's time with 2**18, 2**19 and 2**20 elements and two threads.
"""

_ALIGNMENT = 16
"""Elements: each part of a buffer starts at a multiple, as the kernels' vectors like it."""


def elements(total: int, device: torch.device) -> int:
    """Returns the elements of a block, given those of all tensors."""
    share = total / (_SHARE_ON_CPU if device.type == "cpu" else _SHARE)
    return max(_LEAST, min(_GREATEST, round(share / _LEAST) * _LEAST))


def parts(tensor: Tensor) -> Sequence[Tensor]:
    """Returns a dense tensor, or a piece of it, in 1-d parts of the least length."""
    return flat(tensor).split(_LEAST) if tensor.numel() else ()  # type: ignore[no-untyped-call]


_OPEN = 8
"""How many of the last blocks take further pieces, so that small ones fill what large ones left."""


class Cuts:
    """Cuts through a list of tensors, and others that are laid out alike.

    Large tensors are cut into pieces in the order of memory; a block is a slice of the list of all
    pieces, in the order of the blocks. A small tensor is one piece, and one without elements has
    none. Blocks are not filled up with a part of the next tensor: each piece costs the kernels one
    more barrier.

    Attributes:
        offsets: For each piece, the elements before it in the buffers of its block.
        blocks: Slices of the list of pieces.
        greatest: Elements of the greatest block, each piece at the start of a vector.
    """

    def __init__(self, sizes: Sequence[int], length: int, in_order: bool) -> None:
        """Cuts tensors with these numbers of elements into blocks; see :func:`cuts`."""
        self._length = length
        self._divided = [i for i, size in enumerate(sizes) if not 0 < size <= length]
        filled: list[int] = []
        places: list[tuple[int, int, int]] = []  # of each piece: block, tensor, offset
        for position, size in enumerate(sizes):
            for first in range(0, size, length):
                count = _aligned(min(length, size - first))
                last = range(len(filled))[-1 if in_order else -_OPEN :]
                block = next((b for b in last if filled[b] + count <= length), len(filled))
                if block == len(filled):
                    filled.append(0)
                places.append((block, position, filled[block]))
                filled[block] += count
        order = sorted(range(len(places)), key=lambda i: places[i][0])
        self._order = order if order != list(range(len(order))) else None
        self._positions = [places[i][1] for i in order]
        self.offsets = [places[i][2] for i in order]
        counts = Counter(block for block, _, _ in places)
        ends = accumulate((counts[block] for block in range(len(filled))), initial=0)
        self.blocks = [slice(start, end) for start, end in pairwise(ends)]
        self.greatest = max(filled, default=0)

    def of(self, tensor: Tensor) -> list[Tensor]:
        """Returns the pieces of one tensor: itself, or 1-d views."""
        size, length = tensor.numel(), self._length
        if size <= length:
            return [tensor] if size else []
        start = tensor.storage_offset()  # without a flat view, which takes as long as a piece
        return [
            tensor.as_strided((min(length, size - first),), (1,), start + first)
            for first in range(0, size, length)
        ]

    def of_all(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Returns the pieces of tensors that are laid out as those that were cut."""
        pieces = list(tensors)
        for position in reversed(self._divided if pieces else ()):
            pieces[position : position + 1] = self.of(pieces[position])
        return self.arranged(pieces)

    def arranged(self, pieces: list[T]) -> list[T]:
        """Returns the pieces of all tensors, one after the other, in the order of the blocks."""
        return pieces if self._order is None or not pieces else [pieces[i] for i in self._order]

    def each(self, values: Sequence[T]) -> list[T]:
        """Returns for each piece the value of its tensor."""
        return [values[i] for i in self._positions]


def cuts(tensors: Sequence[Tensor], *, in_order: bool = False) -> Cuts:
    """Returns cuts through tensors of one device.

    Args:
        tensors: The tensors.
        in_order: Whether pieces stay in the order of the tensors, in up to twice as many blocks.
    """
    sizes = tuple(map(Tensor.numel, tensors))
    return _cuts(sizes, elements(sum(sizes), tensors[0].device), in_order)


_cuts = functools.lru_cache(maxsize=32)(Cuts)  # an optimizer cuts the same tensors in each step


class InPlace:
    """A list of tensors that a kernel reads or writes where they are."""

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        self.pieces = list(pieces)

    def load(self, block: slice) -> list[Tensor]:
        """Returns the pieces of a block, for the kernel to work on in place."""
        return self.pieces[block]

    def store(self, block: slice, values: list[Tensor]) -> None:
        """Takes the block's pieces after the kernel."""


Transfer = Callable[[slice, list[Tensor]], None]
"""Fills fp32 pieces of a block, or takes their values."""


class Buffered:
    """One whose pieces exist in fp32 for one block at a time, in a buffer."""

    def __init__(
        self, cuts: Cuts, like: Sequence[Tensor], load: Transfer, store: Transfer | None = None
    ) -> None:
        """Allocates the buffer.

        Args:
            cuts: The cuts through the operand.
            like: Pieces with the device and the strides of the operand's.
            load: Writes the operand's fp32 values into the buffer's pieces.
            store: Takes them back; ``None`` if the kernel only reads them.
        """
        self._buffer = torch.empty(cuts.greatest, dtype=torch.float32, device=like[0].device)
        self.pieces, self._offsets = like, cuts.offsets
        self._load, self._store = load, store

    def load(self, block: slice) -> list[Tensor]:
        part = self._buffer.as_strided
        places = zip(self.pieces[block], self._offsets[block], strict=True)
        values = [part(like.size(), like.stride(), offset) for like, offset in places]
        self._load(block, values)
        return values

    def store(self, block: slice, values: list[Tensor]) -> None:
        if self._store is not None:
            self._store(block, values)


Operand = InPlace | Buffered

Lists = Sequence[Sequence[Tensor]]
"""The positional arguments of a fused operator."""


def divide(lists: Lists, taken: Sequence[bool]) -> tuple[Lists, Lists]:
    """Returns the lists of the parameters that are taken, and those of the others."""

    def pick(which: bool) -> Lists:
        return [[t for t, own in zip(each, taken, strict=False) if own is which] for each in lists]

    return (lists, [[] for _ in lists]) if all(taken) else (pick(True), pick(False))


def run(
    func: Any, lists: Lists, kwargs: Mapping[str, Any], cuts: Cuts, params: Operand, grads: Operand
) -> None:
    """Runs a fused operator of :data:`OPERANDS` block by block.

    Its lists of tensors are on one device and :func:`alike`, with ``cuts`` through the first. It
    gets ``params`` and ``grads`` in place of the first two.
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


def alike(*lists: Sequence[Tensor]) -> list[bool]:
    """Returns for each position in lists of tensors whether those there can be cut alike.

    They have equal sizes, orders in memory and devices, without gaps.
    """
    if _contiguous_alike(lists):
        return [True] * len(lists[0])
    layouts = zip(*map(_layouts, lists), strict=True)
    return [
        each.count(each[0]) == len(each) and is_dense(tensor)
        for each, tensor in zip(layouts, lists[0], strict=True)
    ]


def _contiguous_alike(lists: Sequence[Sequence[Tensor]]) -> bool:
    """Returns whether all tensors can be cut alike and are contiguous, as most are.

    Takes a third of the time of a comparison tensor by tensor.
    """
    tensors = [*chain.from_iterable(lists)]
    if {*map(_layout, tensors)} != {torch.strided} or not all(map(Tensor.is_contiguous, tensors)):
        return False
    first, *others = ([*map(_place, each)] for each in lists)
    return all(each == first for each in others)


def _layouts(tensors: Iterable[Tensor]) -> list[object]:
    return [
        (t.size(), t.device, t.layout is torch.strided and (t.is_contiguous() or t.stride()))
        for t in tensors
    ]


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
