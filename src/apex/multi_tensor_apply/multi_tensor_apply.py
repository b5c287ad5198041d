"""Calls a multi-tensor function with a chunk size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor


class MultiTensorApply:
    """Calls ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``.

    Attributes:
        available: Always true: nothing has to be compiled.
        warned: Always false, for scripts that ask.
        chunk_size: Passed on; the functions of ``amp_C`` do without it.
    """

    available: ClassVar[bool] = True
    warned: ClassVar[bool] = False

    def __init__(self, chunk_size: int) -> None:
        """Makes an applier of one chunk size, in elements."""
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Does nothing: the functions are always available."""

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: Tensor,
        tensor_lists: Sequence[Sequence[Tensor]],
        *args: Any,
    ) -> Any:
        """Returns what ``op`` returns."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
