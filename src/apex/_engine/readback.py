"""Asynchronous copies of small device tensors to the host."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable

from torch import Tensor

from apex._torch.copies import HostCopy, capturing

Reading = tuple[float, ...]


class Readback:
    """A queue of small tensors being copied to the host.

    ``send`` starts a copy and returns at once; ``poll`` returns completed ones, oldest first. A
    tensor in host memory completes at once.
    """

    def __init__(self) -> None:
        self._ready: list[Reading] = []
        self._in_flight: deque[HostCopy] = deque()

    def send(self, values: Tensor) -> bool:
        """Queues the present values of a 1-d tensor; returns whether it did.

        Nothing is queued while a CUDA graph is captured: a replay has no host side.
        """
        return self.prepare(values)()

    def prepare(self, values: Tensor) -> Callable[[], bool]:
        """Returns a function that does what ``send`` does, and allocates its memory now."""
        if values.device.type == "cpu" and not self._in_flight:
            return functools.partial(self._read, values)
        if capturing(values.device):
            return lambda: False
        return functools.partial(self._start, HostCopy(values, start=False))

    def _read(self, values: Tensor) -> bool:
        # On the host, tolist() reads memory in place: no kernel, no wait.
        self._ready.append(tuple(values.tolist()))
        return True

    def _start(self, copy: HostCopy) -> bool:
        self._in_flight.append(copy.start())
        return True

    def poll(self, *, wait: bool = False) -> list[Reading]:
        """Returns readings completed since the last call, oldest first; with ``wait``, all."""
        while self._in_flight and (wait or self._in_flight[0].arrived):
            self._ready.append(tuple(self._in_flight.popleft().wait().tolist()))
        if not self._ready:
            return []
        arrived, self._ready = self._ready, []
        return arrived
