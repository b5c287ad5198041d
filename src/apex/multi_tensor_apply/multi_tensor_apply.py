"""Calls a multi-tensor function with a chunk size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class MultiTensorApply:
    """Calls ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``.

    Attributes:
        available: Always True, because there is nothing to compile.
        warned: Always False; some scripts check it.
        chunk_size: Chunk size in elements, which the functions of ``amp_C`` ignore.
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        """Creates an applier with a chunk size, in elements."""
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
        """Calls ``op`` and returns its result."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
