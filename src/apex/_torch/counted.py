"""Gradients whose version counter also counts writes of foreach kernels and through ``data``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from apex._torch.overrides import without_overrides
from apex._torch.parameters import allow_foreach, set_data

without_counting = without_overrides
"""Context in which these gradients are plain: as fast, and their foreach writes uncounted."""


class CountedGradient(Tensor):
    """A plain gradient that counts writes of ``_foreach_*_`` functions and through ``data``.

    Old scripts clip by ``param.grad.data.clamp_(-1, 1)``. torch's foreach kernels, which
    ``clip_grad_norm_`` uses on accelerators, do not increment the version counter; on a CPU, their
    parts do, but not below a dispatch mode (torch 2.13). To kernels, copies and files it is a plain
    tensor.
    """

    @property
    def data(self) -> Tensor:
        """The values, sharing memory and version counter."""
        return data_of(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        set_data_of(self, value)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls ``func`` with plain results, and counts the write if it is a foreach function."""
        with without_counting():
            result = func(*args, **(kwargs or {}))
            name = getattr(func, "__name__", "")
            if "_foreach_" in name and name.endswith("_"):
                for tensor in args[0] if args else ():
                    if isinstance(tensor, cls):
                        increment_version(tensor)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain tensor, so that it loads without apex."""
        plain: Any = self._plain()
        return plain.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plain())

    def _plain(self) -> Tensor:
        with without_counting():
            return self.detach()


allow_foreach(CountedGradient)


def data_of(grad: Tensor) -> Tensor:
    """Returns an alias of a gradient that counts the same writes."""
    with without_counting():
        values = grad.detach()
    count_writes(values)
    return values


def set_data_of(grad: Tensor, value: Tensor) -> None:
    """Sets the values of a gradient to another tensor, which counts as a write."""
    increment_version(grad)
    with without_counting():
        set_data(grad, value)


def count_writes(grad: Tensor) -> None:
    """Makes a plain gradient a :class:`CountedGradient`, in place."""
    if type(grad) is Tensor:
        # The gradient keeps its identity, and a new object would cost 20 times as much.
        grad.__class__ = CountedGradient


def uncount_writes(grad: Tensor) -> None:
    """Reverts :func:`count_writes`."""
    if type(grad) is CountedGradient:
        grad.__class__ = Tensor  # type: ignore[assignment]
