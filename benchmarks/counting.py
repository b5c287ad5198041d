"""Counts operations that make the host wait for the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

SYNC_OPS = frozenset(
    {
        "aten::_local_scalar_dense",  # item(), bool(tensor), float(tensor)
        "aten::_unique2",
        "aten::equal",
        "aten::is_nonzero",
        "aten::masked_select",
        "aten::nonzero",
        "aten::unique_dim",
    }
)
"""Operators whose result, or its shape, the host needs before it can continue."""

COPIES = ("aten::_to_copy", "aten::copy_")
"""Operators that bring data from one device to another; ``empty_like`` brings none."""

MASKS = (torch.bool, torch.uint8)


class OperatorCounter(TorchDispatchMode):
    """Runs each operator and counts it afterwards; subclasses define how."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs the operator and counts it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.count(func, args, kwargs, result)
        return result

    def count(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Counts an operator that has run."""
        raise NotImplementedError


class _SyncCounter(OperatorCounter):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def count(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        name = func.name().split(".")[0]
        if _waits(name, args, kwargs, result):
            self._counts[name] += 1


class _ListCounter(TorchFunctionMode):
    """Counts ``tolist()`` of a 0-d tensor on the CPU, which calls no operator, unlike ``item()``.

    ``tolist()`` of a longer CPU tensor does not count, because it only reads host memory.
    """

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.tolist and args[0].dim() == 0 and args[0].device.type == "cpu":
            self._counts["tolist"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_syncs() -> Iterator[Counter[str]]:
    """Yields a counter of the host's reads within the block, by operator.

    On the CPU nothing waits; the count is of the reads that would wait on a device.
    """
    counts: Counter[str] = Counter()
    with _SyncCounter(counts), _ListCounter(counts):
        yield counts


@contextmanager
def refused_syncs() -> Iterator[None]:
    """Makes CUDA raise at any host sync within the block; does nothing without CUDA."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _waits(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> bool:
    if name == "aten::index":
        return _has_mask(args[1])
    if name in COPIES:
        return _is_copy_to_host(args, kwargs, result)
    return name in SYNC_OPS


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    """Returns whether a mask is among the indices; the kernel then reads its non-zero places."""
    return any(index is not None and index.dtype in MASKS for index in indices)


def _is_copy_to_host(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> bool:
    """Returns whether the call is a blocking copy from a device to host memory."""
    if not isinstance(result, Tensor) or result.device.type != "cpu":
        return False
    if kwargs.get("non_blocking") or any(arg is True for arg in args):
        return False
    return any(isinstance(arg, Tensor) and arg.device.type not in ("cpu", "meta") for arg in args)
