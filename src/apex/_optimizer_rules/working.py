"""Copies tensors to the dtype and layout that a rule computes in, and writes results back.

Note [Precision of the rules]
Every rule computes in fp32 (fp64 if one of its tensors is), whatever dtype the
tensors are stored in: 16-bit ones are cast up first and rounded once at the end, as apex's kernels
do in registers. This also makes a skipped step exact, as 16-bit values survive the round trip.

Note [Strides]
torch's fused CPU kernels ignore strides: they would silently apply a transposed gradient to the
wrong elements (measured on torch 2.13). So all tensors of one position get the same layout.

Note [Skipped steps]
A loss scaler turns a step off by a flag on the device, which the host never reads. torch's fused
kernels take the flag themselves, and most rules are made of them. Where there is none, a rule runs
on copies, and the flag chooses for each element what is written: the new value or the old one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from apex._core.dtypes import math_dtype
from apex._core.foreach.layouts import shared_layout
from apex._torch import foreach
from apex._torch.dtensor import local


@contextlib.contextmanager
def working(
    grads: Sequence[Tensor], *changed: Sequence[Tensor], skip: Tensor | None = None
) -> Iterator[list[list[Tensor]]]:
    """Yields tensors to compute in: gradients, and the tensors that a rule changes.

    A tensor is yielded itself if it has its position's dtype and layout, otherwise as a copy. If a
    flag may skip the step, every changed tensor is a copy. At the end, copies are written back,
    except the gradients'.
    """
    results = [list(grads), *map(list, changed)]
    dtypes = {tensor.dtype for tensor in chain(*results)}
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    is_contiguous = all(tensor.is_contiguous() for tensor in chain(*results))
    if skip is None and is_contiguous and dtypes == {dtype}:
        yield results  # of most lists, nothing is copied
        return
    sources: list[Tensor] = []
    copies: list[Tensor] = []
    for index, position in enumerate(zip(grads, *changed, strict=True)):
        layout = shared_layout(position)
        for tensor, result in zip(position, results, strict=True):
            is_kept = skip is None or result is results[0]
            if is_kept and layout is not None and tensor.dtype is dtype:
                continue
            memory = layout or torch.contiguous_format
            copy = torch.empty_like(tensor, dtype=dtype, memory_format=memory)
            result[index] = copy
            copies.append(copy)
            sources.append(tensor)
    store(copies, sources)
    yield results
    for targets, values in zip(changed, results[1:], strict=True):
        store(targets, values, skip)


def store(targets: Sequence[Tensor], values: Sequence[Tensor], skip: Tensor | None = None) -> None:
    """Writes rounded ``values`` into ``targets``, where they are not the same tensors.

    Where ``skip``, 0-d, is set, the targets stay.
    """
    olds: list[Tensor] = []
    news: list[Tensor] = []
    for target, value in zip(targets, values, strict=True):
        if target is not value:
            olds.append(local(target))
            news.append(local(value))
    if skip is None:
        foreach.copy_(olds, news)
        return
    skipped = skip != 0
    for old, new in zip(olds, news, strict=True):
        torch.where(skipped, old, new.to(old.dtype), out=old)


def scale_(grads: Sequence[Tensor], factor: Tensor, skip: Tensor | None = None) -> list[Tensor]:
    """Multiplies gradients by 0-d ``factor`` in place; returns them before rounding.

    Where ``skip``, 0-d, is set, they stay.
    """
    wide_grads = [grad.to(math_dtype(grad)) for grad in grads]
    if skip is not None:
        factor = torch.where(skip != 0, 1.0, factor)
    values = [local(grad) for grad in wide_grads]
    torch._foreach_mul_(values, local(factor))
    store(grads, wide_grads)
    return wide_grads
