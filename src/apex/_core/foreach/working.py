"""Copies tensors to the dtype and layout that a rule computes in, and writes results back.

Note [Precision of the rules]
Every rule computes in fp32 (fp64 if a tensor of the same position is fp64), whatever dtype the
tensors are stored in: 16-bit ones are cast up first and rounded once at the end, as apex's kernels
do in registers. This also makes a skipped step exact, as 16-bit values survive the round trip.

Note [Strides]
torch's fused CPU kernels ignore strides: they would silently apply a transposed gradient to the
wrong elements (measured on torch 2.13). So all tensors of one position get the same layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from apex._torch import foreach


def math_dtype(*tensors: Tensor) -> torch.dtype:
    """Returns the dtype to compute in: fp64 if any of ``tensors`` is fp64, else fp32."""
    wide = any(tensor.dtype is torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def working(*lists: Sequence[Tensor]) -> tuple[list[Tensor], ...]:
    """Returns the lists with every tensor in its position's dtype and layout.

    Tensors that match already are returned themselves, others as copies; :func:`store` writes
    results back.
    """
    results = tuple(list(tensors) for tensors in lists)
    copies: list[Tensor] = []
    sources: list[Tensor] = []
    for index, position in enumerate(zip(*lists, strict=True)):
        if _is_ready(position):
            continue
        dtype, layout = math_dtype(*position), _shared_layout(position)
        for tensor, result in zip(position, results, strict=True):
            if layout is not None and tensor.dtype is dtype:
                continue
            memory = layout or torch.contiguous_format
            result[index] = torch.empty_like(tensor, dtype=dtype, memory_format=memory)
            copies.append(result[index])
            sources.append(tensor)
    if copies:
        torch._foreach_copy_(copies, sources)
    return results


def store(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Writes rounded ``values`` into ``targets``, where they are not the same tensors."""
    pairs = [(t, v) for t, v in zip(targets, values, strict=True) if t is not v]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [value for _, value in pairs])


def same_dtype(*lists: list[Tensor]) -> Iterator[list[list[Tensor]]]:
    """Yields the lists in parts of one dtype, as fused kernels require.

    All lists must have the same dtype at each position.
    """
    dtypes = {tensor.dtype for tensor in lists[0]}
    if len(dtypes) == 1:
        yield list(lists)
        return
    groups: Any = foreach.group(lists)
    for parts, _ in groups.values():
        yield parts


def _is_ready(position: tuple[Tensor, ...]) -> bool:
    """Returns whether all are contiguous and all fp32 or all fp64: the fast path."""
    dtype = position[0].dtype
    if dtype is not torch.float32 and dtype is not torch.float64:
        return False
    for tensor in position:  # noqa: SIM110 - a generator would cost more than the check
        if tensor.dtype is not dtype or not tensor.is_contiguous():
            return False
    return True


def _shared_layout(position: tuple[Tensor, ...]) -> torch.memory_format | None:
    """Returns the layout that all tensors share; ``None`` if there is none."""
    for layout in (torch.contiguous_format, torch.channels_last):
        if all(tensor.is_contiguous(memory_format=layout) for tensor in position):
            return layout
    return None
