"""Matches 16-bit values with unrounded ones, element by element, without a host sync."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from apex._torch import dtensor, parameters
from apex._torch.packed import Packed, plain, stacked

_TOGETHER = 2**16
"""Elements that are compared together, which bounds the memory for it."""

_DISPATCH: Any = Tensor.__torch_dispatch__

_unbind_copy: Any = torch.unbind_copy  # torch annotates no result


def exact_value(param: Tensor, candidates: Iterable[Tensor]) -> Tensor:
    """Returns ``param`` in fp32, with unrounded values where they are known.

    Each element comes from the last candidate that rounds to the parameter's element, or from the
    parameter if there is none.

    Args:
        param: A low-precision tensor.
        candidates: Possible unrounded values, such as its master; other shapes are ignored.

    Returns:
        A new fp32 tensor with the parameter's shape and layout.
    """
    # Without no_grad() and the cast of ``value``, which torch.where makes: state_dict calls this
    # for every parameter.
    result = value = dtensor.local(param.detach())
    for candidate in candidates:
        if candidate.shape == param.shape:
            known = dtensor.local(dtensor.laid_out_as(param, candidate.detach()))
            exact = plain(known).to(device=value.device, dtype=torch.float32)
            rounded = _rounded(known, exact, value.dtype)
            if _same_here(rounded, value):
                result = exact.clone()
            else:
                result = torch.where(rounded == value, exact, result)
    return dtensor.with_local(param, result.to(torch.float32))


@torch.no_grad()
def exact_values(params: Sequence[Tensor], known: Sequence[Tensor | None]) -> list[Tensor]:
    """Returns the :func:`exact_value` of each tensor, faster for many small ones.

    Small tensors of one shape are compared together: a handful of operators for all, instead of six
    for each. Every result has memory of its own.

    Args:
        params: Low-precision tensors.
        known: For each of them its unrounded value, or ``None``.
    """
    results = list(params)
    alone: list[int] = []
    by_shape: defaultdict[torch.Size, list[int]] = defaultdict(list)
    for index, param in enumerate(params):
        if type(param) is Tensor and known[index] is not None:
            by_shape[param.shape].append(index)
        else:
            alone.append(index)
    for shape, indices in by_shape.items():
        count = max(_TOGETHER // max(shape.numel(), 1), 1)
        for start in range(0, len(indices), count):
            which = indices[start : start + count]
            made = _of_one_shape([params[i] for i in which], [known[i] for i in which])
            for index, value in zip(which, made, strict=False):
                results[index] = value
            if not made:
                alone += which
    for index in alone:
        candidate = known[index]
        results[index] = exact_value(params[index], [] if candidate is None else [candidate])
    return results


def _of_one_shape(params: list[Tensor], known: list[Any]) -> Sequence[Tensor]:
    """Returns the exact values of plain tensors of one shape, or nothing if they differ."""
    if len(params) == 1:
        return ()
    if len(params[0].shape) > 1 and not all(map(Tensor.is_contiguous, params)):
        return ()
    kinds: set[Any] = set(map(type, known))
    packed = all(isinstance(each, Packed) for each in known)
    if not packed and any(kind.__torch_dispatch__ is not _DISPATCH for kind in kinds):
        return ()
    try:
        value, joined = torch.stack(params), stacked(known) if packed else torch.stack(known)
    except RuntimeError:  # of other shapes, or on several devices
        return ()
    if joined.shape != value.shape or value.dtype is not params[0].dtype:
        return ()
    exact = plain(joined).to(device=value.device, dtype=torch.float32)
    rounded = _rounded(joined, exact, value.dtype)
    if not _same_here(rounded, value):
        exact = torch.where(rounded == value, exact, value)
    values: Sequence[Tensor] = _unbind_copy(exact)
    return values


def _same_here(rounded: Tensor, value: Tensor) -> bool:
    """Returns whether both are equal and laid out alike, if the host may look: on the CPU."""
    return (
        type(value) is Tensor
        and value.is_cpu
        and rounded.stride() == value.stride()
        and torch.equal(rounded, value)  # half the time of == and torch.where
    )


def _rounded(tensor: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``exact``, the values of ``tensor``, as a model of ``dtype`` holds them."""
    if isinstance(tensor, Packed) and tensor.packing.high.dtype is dtype:
        return tensor.packing.high.to(exact.device)
    return exact.to(dtype)


@torch.no_grad()
def makes_equal(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns whether rounding to ``dtype`` makes distinct elements equal, as a 0-d bool tensor."""
    exact = value.detach().flatten().sort().values
    rounded = exact.to(dtype)
    return ((exact[1:] != exact[:-1]) & (rounded[1:] == rounded[:-1])).any()


@torch.no_grad()
def update_master(param: Tensor, master: Tensor, *, keep_low_bits: bool = True) -> None:
    """Copies ``param`` into its fp32 ``master``, in place.

    Args:
        param: A low-precision tensor.
        master: Its fp32 master.
        keep_low_bits: Whether to keep the master's elements that already round to the parameter's.
    """
    value, exact = dtensor.locals_of([param, master])
    rounded = value.to(device=exact.device, dtype=torch.float32)
    if keep_low_bits:
        known = plain(exact)
        same = _rounded(exact, known, value.dtype).to(torch.float32) == rounded
        rounded = torch.where(same, known, rounded)
    if isinstance(exact, Packed):
        exact.packing.load(rounded)
        return
    # Not counted by autograd: a loss that uses masters directly may have saved them for backward.
    parameters.uncounted(exact).copy_(rounded)
