"""Asynchronous copies of small device tensors to the host, each with what it belongs to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

from apex._torch.copies import HostCopy, capturing

T = TypeVar("T")
Reading = tuple[T, tuple[float, ...]]
"""What the values belong to, and the values."""


class Readback(Generic[T]):
    """A queue of small tensors being copied to the host.

    ``send`` starts a copy and returns at once; ``poll`` returns completed ones, oldest first. A
    tensor in host memory completes at once.
    """

    def __init__(self) -> None:
        self._ready: list[Reading[T]] = []
        self._in_flight: deque[tuple[T, HostCopy]] = deque()

    def send(self, source: T, values: Tensor) -> None:
        """Queues the present values of a 1-d tensor, with what they belong to.

        Nothing is queued while a CUDA graph is captured: a replay has no host side.
        """
        self.prepare(source, values)()

    def prepare(self, source: T, values: Tensor) -> Callable[[], None]:
        """Returns a function that does what ``send`` does, and allocates its memory now."""
        if values.device.type == "cpu" and not self._in_flight:
            # On the host, tolist() reads memory in place: no kernel, no wait.
            return lambda: self._ready.append((source, tuple(values.tolist())))
        if capturing(values.device):
            return lambda: None
        copy = HostCopy(values)
        return lambda: self._in_flight.append((source, copy.start()))

    def poll(self, *, wait: bool = False) -> list[Reading[T]]:
        """Returns readings completed since the last call, oldest first; with ``wait``, all."""
        while self._in_flight and (wait or self._in_flight[0][1].arrived):
            source, copy = self._in_flight.popleft()
            self._ready.append((source, tuple(copy.wait().tolist())))
        if not self._ready:
            return []
        arrived, self._ready = self._ready, []
        return arrived
